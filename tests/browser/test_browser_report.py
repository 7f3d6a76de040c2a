"""The report of a sweep as a reader sees it: complete, quiet, legible at every width and in both
colour schemes, and saying what the record says."""

from collections.abc import Callable
from pathlib import Path

import pytest
from jitney_measure import record
from jitney_measure.record import Result
from jitney_measure.report import write_comparison, write_report

from tests.browser import records
from tests.browser.conftest import Look
from tests.browser.view import SCHEMES, WIDTHS, View, cut_off, missing

pytestmark = pytest.mark.browser

ONE_CALL = ("throughput", "latency")
LANGUAGE = (*ONE_CALL, "ttft", "itl")
RESULTS: dict[str, tuple[Callable[[], Result], tuple[str, ...]]] = {
    "language": (records.language_sweep, LANGUAGE),
    "unstable": (records.unstable_sweep, ONE_CALL),
}
PAGES = (*RESULTS, "compare")


class Report:
    """A page and what it is to show."""

    def __init__(self, page: Path, results: tuple[Result, ...], figures: tuple[str, ...]) -> None:
        self.page, self.results, self.figures = page, results, figures


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Report]:
    """All of them, by way of the file that a sweep leaves."""
    folder = tmp_path_factory.mktemp("reports")
    made = {}
    for name, (simulate, figures) in RESULTS.items():
        record.write(simulate(), folder / f"{name}.json")
        result = record.read(folder / f"{name}.json")
        made[name] = Report(write_report(result, folder / name), (result,), figures)
    a = made["language"].results[0]
    b = records.language_sweep(speed=1.3, title="chat-7b with the kernels of the next release")
    made["compare"] = Report(write_comparison(a, b, folder / "compare"), (a, b), LANGUAGE)
    return made


def best_rows(view: View, result: Result) -> list[str]:
    """Complaints about the row that is marked as the best."""
    if result.best is None:
        expected = []
    else:
        shown = result.best.throughput
        expected = [(f"{result.best.load} (best)", f"{shown:,.{0 if shown >= 1000 else 1}f}")]
    rows = view.page.locator("tr.chosen").all()
    marked = [tuple(row.locator("th, td").all_inner_texts()[i] for i in (0, 2)) for row in rows]
    return [] if marked == expected else [f"the best row is {marked}, but should be {expected}"]


@pytest.mark.parametrize("name", PAGES)
def test_it_is_alone_and_quiet_and_every_figure_is_drawn(
    name: str, reports: dict[str, Report], look: Look
) -> None:
    report = reports[name]
    view = look(report.page)
    assert view.said() == []
    shown = view.page.locator("figure").evaluate_all("all => all.map(e => e.id)")
    assert missing(shown, report.figures) == []
    assert len(view.page.locator("figure img").all()) == len(report.figures)
    assert view.undrawn() == []
    pictures = {path.stem: path.read_bytes() for path in report.page.parent.glob("*.png")}
    assert missing(pictures, report.figures) == []
    assert [name for name, png in pictures.items() if cut_off(png)] == []
    assert view.names() == []
    title = " and ".join(result.title for result in report.results)
    assert view.page.title() == title
    assert view.texts("h1") == [title]


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", PAGES)
def test_it_can_be_read(
    name: str, width: int, scheme: str, reports: dict[str, Report], look: Look
) -> None:
    view = look(reports[name].page, width=width, scheme=scheme)
    assert view.overflow() == []
    assert view.contrast() == []
    dark = view.page.evaluate("getComputedStyle(document.body).backgroundColor") != (
        "rgb(255, 255, 255)"
    )
    assert dark == (scheme == "dark"), "the page follows the reader's choice"


@pytest.mark.parametrize("name", RESULTS)
def test_it_says_what_the_record_says(name: str, reports: dict[str, Report], look: Look) -> None:
    (result,) = reports[name].results
    view = look(reports[name].page)
    assert best_rows(view, result) == []
    loads = view.page.get_by_role("region", name="Loads", exact=True)
    rows = loads.locator("tbody tr:not(.note)").all()
    assert len(rows) == len(result.points)
    for row, point, verdict in zip(rows, result.points, result.verdicts, strict=True):
        cells = row.locator("th, td").all_inner_texts()
        assert cells[0].removesuffix(" (best)") == str(point.load)
        assert cells[1] == point.state
        assert cells[-1] == ("over" if verdict.over else "met")
        if point.measured is not None:
            assert float(cells[2].replace(",", "")) == pytest.approx(
                point.measured.throughput, abs=0.5
            )
    notes = " ".join(loads.locator(".note").all_inner_texts())
    for point, verdict in zip(result.points, result.verdicts, strict=True):
        assert all(remark in notes for remark in point.remarks)
        assert all(bound in notes for bound in verdict.over)
    verdict_line = view.texts(".best")[0]
    assert verdict_line.startswith("Best with" if result.best else "No load meets")
