"""docs/architecture.md against the repository: its rooms, its drawing, the files of one request."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "backend" / "jitney" / "jitney"
NEIGHBOURS = {"server", "gateway", "jobs", "measure", "export"}
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
FOLDERS = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
MODULES = {path.stem for path in PACKAGE.glob("*.py")} - {"__init__"}
FIRST_CELL = re.compile(r"^\| (`[^|]+`) \|", re.M)


def listed(heading: str) -> set[str]:
    """The names in the first column of the table that begins with this heading."""
    table = PAGE[PAGE.index(f"| {heading} |") :].split("\n\n")[0]
    cells = FIRST_CELL.findall(table)
    return {name for cell in cells for name in re.findall(r"`(\w+)(?:/|\.py)`", cell)}


def test_every_room_is_listed() -> None:
    assert listed("room of `backend/jitney/jitney`") == FOLDERS | MODULES


def test_every_neighbour_is_listed() -> None:
    with_packages = {path.parent.parent.name for path in ROOT.glob("*/jitney_*/__init__.py")}
    assert listed("neighbour") == with_packages | {"export"} == NEIGHBOURS


def test_the_drawing_has_every_folder() -> None:
    drawing = re.search(r"^```text\n(.*?)^```", PAGE, re.M | re.S)
    assert drawing
    missing = [name for name in FOLDERS | NEIGHBOURS if not re.search(rf"\b{name}\b", drawing[1])]
    assert missing == []


def test_the_files_of_a_request_are_there() -> None:
    section = re.search(r"^## One request, step by step\n(.*?)^## ", PAGE, re.M | re.S)
    assert section
    files = re.findall(r"`([\w/]+\.py)`", section[1])
    assert len(set(files)) >= 8
    assert [name for name in files if not (PACKAGE / name).is_file()] == []
    assert len(re.findall(r"^\d\. ", section[1], re.M)) == 8


def test_the_page_is_two_pages_long() -> None:
    assert len(PAGE.split()) <= 1100
