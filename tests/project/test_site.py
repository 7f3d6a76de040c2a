"""docs/ builds as a site, strictly: links and anchors lead somewhere, every page is reached."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
EXTRA = 'needs the extra "docs"'


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A copy of what the site is made from, free to be broken."""
    pytest.importorskip("material", reason=EXTRA)
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "mkdocs.yml", tmp_path)
    shutil.copy(ROOT / "scripts" / "site_hooks.py", tmp_path / "scripts")
    shutil.copytree(DOCS, tmp_path / "docs")
    return tmp_path


def build(project: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict"],
        cwd=project,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_site_builds_with_every_page(project: Path) -> None:
    done = build(project)
    assert done.returncode == 0, done.stderr
    site = project / "build" / "docs"
    made = {page.stem for page in site.glob("*.html")} - {"404"}
    assert made == {page.stem for page in DOCS.glob("*.md")}
    start = (site / "index.html").read_text(encoding="utf-8")
    assert [name for name in made if f'href="{name}.html"' not in start] == [], "left out of nav"
    for page in DOCS.glob("*.md"):
        shown = (site / f"{page.stem}.html").read_text(encoding="utf-8")
        fences = len(re.findall(r"^ *```\w", page.read_text(encoding="utf-8"), re.M))
        assert shown.count('<div class="highlight">') == fences, f"{page.name}: blocks of code"
        assert "```" not in shown, f"{page.name}: a fence that is none"
    for page in site.glob("*.html"):
        foreign = re.findall(r'(?:<script|<img)[^>]*src="https?:[^"]*', page.read_text("utf-8"))
        assert foreign == [], f"{page.name} fetches from elsewhere"


def test_a_link_out_of_docs_becomes_a_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import site_hooks

    text = "See [the tests](../tests/project), [`Makefile`](../Makefile) and [options](options.md)."
    assert site_hooks.on_page_markdown(text, page=None) == (
        "See the tests (`tests/project`), `Makefile` and [options](options.md)."
    )


def test_what_migrating_calls_ours_is_ours() -> None:
    """Names in the column of Jitney stand in the tables that are checked against the code."""
    pages = ("options.md", "contract.md", "metrics.md")
    known = "".join((DOCS / page).read_text(encoding="utf-8") for page in pages)
    seen = 0
    for line in (DOCS / "migrating.md").read_text(encoding="utf-8").splitlines():
        cells = line.strip("|").split(" | ")
        if not line.startswith("| ") or len(cells) != 3:
            continue
        for name in re.findall(r"`([a-z_]+)(?:: [a-z]+)?`", cells[1]):
            assert f"`{name}`" in known, f"{line}: {name}"
            seen += 1
    assert seen > 45


def test_every_alert_is_explained() -> None:
    """In a section of its own that says what to do."""
    rules = "".join(rule.read_text("utf-8") for rule in (ROOT / "deploy/prometheus").rglob("*.yml"))
    alerts = set(re.findall(r"- alert: (\w+)", rules))
    assert alerts
    deploying = (DOCS / "deploying.md").read_text("utf-8")
    sections = dict(re.findall(r"^### (\w+)\n(.+?)(?=\n#|\Z)", deploying, re.M | re.S))
    for alert in alerts:
        assert len(sections[alert].split()) >= 12, f"{alert}: what it means and what to do"
