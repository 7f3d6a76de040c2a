"""The documentation's site, opened from its folder: quiet, complete, and asking nobody else."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.browser.conftest import Look
from tests.browser.view import WIDTHS

pytestmark = pytest.mark.browser

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("index", "sweep", "deploying")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As `make docs` builds it; that it builds without warnings is tests/project/test_site.py's."""
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(folder)],
        cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_quiet_and_fits_and_its_figures_are_drawn(
    name: str, width: int, site: Path, look: Look
) -> None:
    view = look(site / f"{name}.html", width=width)
    assert view.said() == []
    assert view.names() == []
    assert view.overflow() == []
    figures = view.page.locator("article img").count()
    assert figures > 0 or name != "index", "the picture of the batch"
    if figures:
        assert view.undrawn("article img") == []
