"""The page is whole in itself, says what was unstable, and the file gives back the result."""

import base64
import math
import re
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jitney.errors import InvalidArgumentError
from jitney_measure import plots, record
from jitney_measure.exchanges import Exchange, measure, read_export
from jitney_measure.record import PERCENTS, EngineWork, Load, LoadPoint, Result, Stage
from jitney_measure.report import write_comparison, write_report
from jitney_measure.slo import parse, point_line
from msgspec.structs import replace

from tests.measure.exports import calls, result_of, write_export

SLO = "latency-p95=50ms"
FAILURE = "perf_analyzer ended with status 99: <script>&"


@pytest.fixture(scope="module")
def calls_result() -> Result:
    stage = Stage("part", 100, 20, 5.0, 0.002, 0.005)
    return result_of(
        (
            LoadPoint(
                Load("concurrency", 1), "steady", (),
                measure(calls(100, 0.01, 0.01), language=False), (stage,),
            ),
            LoadPoint(
                Load("concurrency", 4), "unstable", ("it wavered",),
                measure(calls(100, 0.004, 0.08), language=False), (stage,),
            ),
            LoadPoint(Load("rate", 9), "failed", (FAILURE,)),
        ),
        language=False, bounds=SLO,
    )  # fmt: skip


@pytest.fixture(scope="module")
def language_result(tmp_path_factory: pytest.TempPathFactory) -> Result:
    streams = [
        (100 * i, [(100 * i + 20, 1), (100 * i + 40, 2), (100 * i + 90 + i, 3)]) for i in range(9)
    ]
    found = measure(
        read_export(write_export(tmp_path_factory.mktemp("e") / "p.json", streams)), language=True
    )
    work = EngineWork(40.0, 1.25, 0.004, 450.0, 54.0, 16.0, 2.0)  # as the metrics give it
    point = LoadPoint(Load("concurrency", 1), "steady", (), found, (), work)
    return result_of((point,), language=True, bounds="ttft-p95=25ms")


def parsed(page: Path) -> ET.Element:
    """Well-formed, or an error."""
    text = page.read_text(encoding="utf-8")
    assert text.startswith("<!DOCTYPE html>\n")
    return ET.fromstring(text.removeprefix("<!DOCTYPE html>\n"))


def check_alone(page: Path, plots: set[str]) -> str:
    """No script, nothing from elsewhere, every figure inside and beside it; returns the text."""
    root = parsed(page)
    assert not list(root.iter("script"))
    addresses = [e.get(a) for e in root.iter() for a in ("src", "href") if e.get(a)]
    assert all(address.startswith("data:") for address in addresses)
    assert not re.search(r"url\(|@import", page.read_text(encoding="utf-8"))
    images = list(root.iter("img"))
    assert len(images) == len(plots)
    for image in images:
        assert image.get("alt")
        svg = ET.fromstring(base64.b64decode(image.get("src").partition("base64,")[2]))
        assert svg.tag.endswith("svg")
        assert len(list(svg.iter())) > 50, "the plot has content"
    assert {path.stem for path in page.parent.glob("*.png")} == plots
    for path in page.parent.glob("*.png"):
        assert path.read_bytes().startswith(b"\x89PNG")
    return " ".join("".join(root.find("body").itertext()).split())


def test_the_page_of_a_model_of_one_call(calls_result: Result, tmp_path: Path) -> None:
    page = write_report(calls_result, tmp_path / "out")
    text = check_alone(page, {"throughput", "latency"})
    assert "a <b>title</b> & more" in text
    assert "Best with latency-p95=50ms: 1 at once, 100.0 rows/s." in text
    (box,) = [p for p in parsed(page).iter("p") if "best" in p.get("class", "")]
    assert box.get("class") == "best"
    assert "it wavered" in text
    assert FAILURE in text, "a failed load is in the report"
    assert "latency-p95 is 80 ms" in text
    assert "5.00" in text, "the mean batch, 100 inferences in 20 executions"


def test_the_page_of_a_language_model(language_result: Result, tmp_path: Path) -> None:
    page = write_report(language_result, tmp_path / "out")
    names = {"throughput", "ttft", "itl", "latency"}
    text = check_alone(page, names)
    assert "hit tokens" in text
    rows = [[cell.text for cell in row] for row in parsed(page).iter("tr")]
    assert ["1 at once", "40", "1.25", "4.00", "450", "54", "16", "2"] in rows, "whole numbers"
    # At the first load the engine's metrics could not be read, only the server's.
    (point,) = language_result.points
    stage = Stage("m", 9, 9, 1.0, 0.0, 0.1)
    points = (replace(point, engine=None, stages=(stage,)), replace(point, stages=(stage,)))
    both = replace(language_result, points=points, verdicts=language_result.verdicts * 2)
    assert "hit tokens" in write_report(both, tmp_path).read_text(encoding="utf-8")


def test_a_page_without_figures_and_a_best_load_with_a_caution(
    calls_result: Result, tmp_path: Path
) -> None:
    """A page without figures has no plots to wait for."""
    nothing = result_of(
        (LoadPoint(Load("rate", 9), "failed", ("why",)),), language=False, bounds=SLO
    )
    text = " ".join("".join(parsed(write_report(nothing, tmp_path)).itertext()).split())
    assert "No load could be measured." in text
    assert "why" in text
    assert calls_result.best is not None
    doubtful = replace(nothing, best=replace(calls_result.best, caution="it wavered"))
    page = write_report(doubtful, tmp_path)
    assert [p for p in parsed(page).iter("p") if p.get("class") == "best caution"]


def test_the_file_gives_back_the_result(calls_result: Result, tmp_path: Path) -> None:
    record.write(calls_result, tmp_path / "r.json")
    assert record.read(tmp_path / "r.json") == calls_result


def test_the_file_takes_what_any_numpy_computed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """numpy's count is an int in some versions and a scalar of its own in others, as in the image
    of the profile `perf`. The record's encoder knows Python's own numbers only."""
    count = np.count_nonzero
    monkeypatch.setattr(np, "count_nonzero", lambda values: np.int64(count(values)))
    result = result_of((spoken(1, SOME),), language=True, bounds="ttft-p95=25ms")
    record.write(result, tmp_path / "r.json")
    assert record.read(tmp_path / "r.json") == result


@pytest.mark.parametrize(
    ("pattern", "by", "said"),
    [
        (".*", "", "not the record of jitney bench"),
        ('"version": 1', '"version": 99', "99.*version"),
        (r'"quantiles": \[', '"quantiles": [0.5,', "length <= 103"),
    ],
)
def test_another_file_is_refused(
    pattern: str, by: str, said: str, calls_result: Result, tmp_path: Path
) -> None:
    record.write(calls_result, tmp_path / "r.json")
    text = (tmp_path / "r.json").read_text(encoding="utf-8")
    (tmp_path / "r.json").write_text(re.sub(pattern, by, text), encoding="utf-8")
    with pytest.raises(InvalidArgumentError, match=rf"r\.json.*{said}"):
        record.read(tmp_path / "r.json")


def spoken(level: float, exchanges: Sequence[Exchange]) -> LoadPoint:
    """Of a language model."""
    return LoadPoint(Load("concurrency", level), "steady", (), measure(exchanges, language=True))


ONE_TOKEN = [Exchange(i * 0.1, (i * 0.1 + 0.02,), (1,), i * 0.1 + 0.02) for i in range(20)]
NO_TIME = [Exchange(i * 0.1, (i * 0.1,) * 2, (1, 2), i * 0.1) for i in range(20)]
SOME = [Exchange(i * 0.1, (i * 0.1 + 0.02, i * 0.1 + 0.03), (1, 2), i * 0.1 + 0.03)
        for i in range(20)]  # fmt: skip


@pytest.mark.filterwarnings("error")
def test_times_that_are_not_there_or_zero_and_no_load_in_common(tmp_path: Path) -> None:
    """Answers of one token have nothing between tokens; a logarithm shows no zero. Equal times are
    equal but for their last bits, which depend on the processor: one logarithm, an axis without
    width."""
    alone = result_of((spoken(1, ONE_TOKEN), spoken(2, NO_TIME)), language=True, bounds="")
    equal = spoken(1, SOME)
    assert equal.measured is not None
    assert equal.measured.itl is not None
    steady = (0.01,) * (len(PERCENTS) - 1)
    itl = replace(equal.measured.itl, quantiles=(*steady, math.nextafter(0.01, 1)))
    equal = replace(equal, measured=replace(equal.measured, itl=itl))
    other = replace(alone, title="other", points=(equal, replace(equal, load=Load("rate", 8))))
    page = write_comparison(alone, other, tmp_path)
    assert "Loads of both" in "".join(parsed(page).itertext())


def test_a_time_of_zero_has_its_mark_on_the_curve(monkeypatch: pytest.MonkeyPatch) -> None:
    """The curve, the marker, its number and the ring of the best load, all at the least height."""
    monkeypatch.setattr(plots, "saved", lambda figure, *_: figure)
    result = result_of((spoken(1, NO_TIME),), language=True, bounds="")
    figure: Any = plots.plots([result])[0]
    for axes in figure.axes:
        assert [list(line.get_ydata()) for line in axes.lines] == [[1e-6]] * 3
        assert [number.xy[1] for number in axes.texts] == [1e-6]


def test_the_mark_of_a_bound_stands_at_its_percent(
    calls_result: Result, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also at 0; that of a mean at 50."""
    monkeypatch.setattr(plots, "saved", lambda figure, *_: figure)
    for bound, percent in (("p0", 0), ("p95", 95), ("mean", 50)):
        bounds = parse(f"latency-{bound}=5ms", language=False)
        figure: Any = plots.plots([calls_result], bounds)[-1]
        marks = [line for line in figure.axes[0].lines if line.get_marker() == "D"]
        assert [list(mark.get_ydata()) for mark in marks] == [[percent]]


def test_any_title_is_shown(calls_result: Result, tmp_path: Path) -> None:
    """No mathematics, no legend without it, nothing that XML may not have."""
    title = "_for $5 \\frac{ $ $\\x$ bell \x07 \x1b[31m \udcff"
    stage = Stage("a&b <i>", 100, 20, 5.0, 0.002, 0.005)
    hostile = replace(
        calls_result, title=title, model=title, verdicts=calls_result.verdicts[:1],
        points=(replace(calls_result.points[0], stages=(stage,), remarks=(title,)),),
    )  # fmt: skip
    text = check_alone(write_report(hostile, tmp_path), {"throughput", "latency"})
    assert "a&b <i>" in text, "escaped, and once"


def test_what_cannot_be_compared(
    calls_result: Result, language_result: Result, tmp_path: Path
) -> None:
    with pytest.raises(InvalidArgumentError, match="only one is a language model"):
        write_comparison(calls_result, language_result, tmp_path)


def test_the_terminal_says_the_same(calls_result: Result) -> None:
    steady, unstable, failed = (point_line(point, False) for point in calls_result.points)
    assert "100.0 rows/s" in steady
    assert "[yellow]unstable" in unstable
    assert "it wavered" in unstable
    assert "[red]failed" in failed
