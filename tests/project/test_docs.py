"""What the documents say is what the code does."""

import re
import subprocess
from pathlib import Path

import pytest
from jitney.sampling_params import NAMES

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])


def test_the_table_of_options_is_current(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import options_table

    written = options_table.TARGET.read_text(encoding="utf-8")
    assert written == options_table.make_page(), "run: python scripts/options_table.py"


def test_every_sampling_parameter_is_documented() -> None:
    contract = (ROOT / "docs" / "contract.md").read_text(encoding="utf-8")
    assert [name for name in NAMES if f"`{name}`" not in contract] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_the_tests_that_together_names_are_there() -> None:
    table = (ROOT / "docs" / "together.md").read_text(encoding="utf-8")
    named = re.findall(r"^\| \w \| (.+?) \| ", table, re.M)
    assert len(named) >= 8
    for cell in named:
        file, _, first = re.findall(r"`(.+?)(::)(\w+)`", cell)[0]
        others = re.findall(r"and `(\w+)`", cell)
        source = (ROOT / file).read_text(encoding="utf-8")
        for name in (first, *others):
            assert re.search(rf"^(?:def|class) {name}\b", source, re.M), f"{file}: {name}"


def test_make_help_lists_every_target() -> None:
    text = subprocess.run(
        ["make", "-s", "help"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    for target in ("demo", "serve", "test", "check", "bench", "help", "doctor", "clean"):
        assert re.search(rf"make {target} +\w", text), target
