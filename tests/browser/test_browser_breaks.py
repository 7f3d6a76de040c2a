"""The checks complain when they should: a report that is right is broken in one way at a time."""

import io
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from jitney.sweep.report import write_report

from tests.browser import records
from tests.browser.conftest import Look
from tests.browser.test_browser_report import LANGUAGE, best_rows
from tests.browser.view import View, blank, cut_off, missing

pytestmark = pytest.mark.browser

_EMPTY = (
    "data:image/svg+xml;utf8,<svg xmlns='http://www.w3.org/2000/svg' width='{0}' height='{0}'/>"
)


def _replaced(pattern: str, by: str) -> Callable[[str], str]:
    """The first place that the pattern fits."""
    return lambda text: re.sub(pattern, lambda _: by, text, count=1, flags=re.S)


def _added(html: str) -> Callable[[str], str]:
    return lambda text: text.replace("</main>", html + "</main>")


def figures(view: View) -> list[str]:
    """As the test of the report looks for them."""
    shown = view.page.locator("figure").evaluate_all("all => all.map(e => e.id)")
    return missing(shown, LANGUAGE)


def best(view: View) -> list[str]:
    """Against the record."""
    return best_rows(view, records.language_sweep())


BREAKS: dict[str, tuple[Callable[[str], str], Callable[[View], list[str]], str]] = {
    "script error": (_added("<script>nothing.here()</script>"), View.said, "nothing is not"),
    "console": (_added("<script>console.warn('look')</script>"), View.said, "warning: look"),
    "late error": (
        _added("<script>setTimeout(() => console.error('late'), 100)</script>"), View.said, "late",
    ),
    "picture from elsewhere": (
        _added("<img src='http://elsewhere.invalid/a.png' alt='a picture' />"), View.said,
        "asked for http://elsewhere.invalid/a.png",
    ),
    "style from elsewhere": (
        _replaced("<style>", "<style>@import url('http://elsewhere.invalid/a.css');"), View.said,
        "elsewhere.invalid/a.css",
    ),
    "file that is not there": (
        _added("<img src='gone.png' alt='a picture' />"), View.said, "gone.png",
    ),
    "file of another folder": (
        _added("<img src='../other.png' alt='a picture' />"), View.said, "asked for file",
    ),
    "figure left out": (
        _replaced('<figure id="itl".*?</figure>', ""), figures, "itl is missing",
    ),
    "figure nobody promised": (
        _added('<figure id="more"></figure>'), figures, "more was not promised",
    ),
    "broken picture": (
        _replaced("svg\\+xml;base64,[^\"]*", "svg+xml;base64,AAAA"), View.undrawn, "no size",
    ),
    "blank picture": (
        _replaced("data:image/svg[^\"]*", _EMPTY.format(600)), View.undrawn, "is blank",
    ),
    "tiny picture": (
        _replaced("img \\{ display: block;", "img { max-width: 9px; display: block;"), View.undrawn,
        "no size",
    ),
    "no picture at all": (
        lambda text: re.sub("<img[^>]*/>", "", text), View.undrawn, "there is no img",
    ),
    "too wide": (_added("<p style='width: 3000px'>far</p>"), View.overflow, "P."),
    "pale": (_added("<p style='color: #999'>pale</p>"), View.contrast, '"pale" has a contrast'),
    "pale behind": (
        _added("<p style='background: rgba(0, 0, 0, .6)'>dim</p>"), View.contrast, '"dim"',
    ),
    "no language": (_replaced(' lang="en"', ""), View.names, "no language"),
    "no title": (_replaced("<title>.*?</title>", ""), View.names, "no title"),
    "no heading": (_replaced("<h1>.*?</h1>", ""), View.names, "0 first headings"),
    "no alternative text": (_replaced('alt="[^"]*"', 'alt=""'), View.names, "IMG has no name"),
    "no label": (_replaced('aria-label="Loads"', ""), View.names, "DIV has no name"),
    "another best": (
        _replaced('<tr class="chosen">', "<tr>"), best, "the best row is [], but should be",
    ),
    "wrong figure of the best": (
        _replaced('(?<=\\(best\\)</th>)(<td>.*?</td>)<td>.*?</td>', "<td>steady</td><td>7.0</td>"),
        best, "7.0",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def right(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report(records.language_sweep(), tmp_path_factory.mktemp("right"))


@pytest.mark.parametrize("name", BREAKS)
def test_it_is_complained_about(name: str, right: Path, tmp_path: Path, look: Look) -> None:
    damage, check, word = BREAKS[name]
    text = right.read_text(encoding="utf-8")
    broken = damage(text)
    assert broken != text, "the damage hits nothing"
    page = tmp_path / "page" / "report.html"
    page.parent.mkdir()
    page.write_text(broken, encoding="utf-8")
    complaints = check(look(page))
    assert any(word in complaint for complaint in complaints), complaints


def test_what_is_right_is_not(right: Path, look: Look) -> None:
    """The same checks, each on the page as it was."""
    view = look(right)
    checks = dict.fromkeys(check for _, check, _ in BREAKS.values())
    assert [text for check in checks for text in check(view)] == []


def test_a_picture_that_goes_on_beyond_its_edge(right: Path) -> None:
    from PIL import Image

    def png(image: Image.Image) -> bytes:
        buffer = io.BytesIO()
        image.save(buffer, "png")
        return buffer.getvalue()

    whole = Image.open(right.parent / "queue.png")
    assert cut_off(png(whole)) == []
    middle = whole.height // 2
    assert cut_off(png(whole.crop((0, 0, whole.width // 2, whole.height)))) != []
    assert cut_off(png(whole.crop((0, middle, whole.width, whole.height)))) != []
    assert blank(png(Image.new("RGB", (300, 200), "white"))) != []
