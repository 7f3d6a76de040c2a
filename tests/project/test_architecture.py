"""docs/architecture.md against the package: its rooms, their sizes, the files of one request."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "backend" / "jitney" / "jitney"
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
ROW = re.compile(r"^\| `(\w+)(?:/|\.py)` \| ([\d,]+) \|", re.M)


def lines_of(name: str) -> int:
    """Lines of Python of a room: a folder of the package, or one of the modules at its top."""
    folder = PACKAGE / name
    files = folder.rglob("*.py") if folder.is_dir() else [PACKAGE / f"{name}.py"]
    return sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files)


def test_every_room_is_listed_with_its_size() -> None:
    stated = {name: int(count.replace(",", "")) for name, count in ROW.findall(PAGE)}
    rooms = {path.stem for path in PACKAGE.iterdir() if path.name not in ("__pycache__",)}
    assert stated.keys() == rooms - {"__init__"}
    wrong = {
        name: (count, lines_of(name))
        for name, count in stated.items()
        if not 0.9 <= count / lines_of(name) <= 1.1
    }
    assert wrong == {}, "stated and real lines differ by more than a tenth"


def test_the_drawing_has_every_room() -> None:
    drawing = re.search(r"^```text\n(.*?)^```", PAGE, re.M | re.S)
    assert drawing
    missing = [name for name, _ in ROW.findall(PAGE) if not re.search(rf"\b{name}\b", drawing[1])]
    assert missing == []


def test_the_files_of_a_request_are_there() -> None:
    section = re.search(r"^## One request, step by step\n(.*?)^## ", PAGE, re.M | re.S)
    assert section
    files = re.findall(r"`([\w/]+\.py)`", section[1])
    assert len(set(files)) >= 8
    assert [name for name in files if not (PACKAGE / name).is_file()] == []
    assert len(re.findall(r"^\d\. ", section[1], re.M)) == 8
    assert len(set(files)) <= 15, "the way of a request passes at most 15 files"
