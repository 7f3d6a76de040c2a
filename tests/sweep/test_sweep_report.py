"""The page is whole in itself, says what was unstable, and the file gives back the result."""

import base64
import json
import re
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from pathlib import Path

import pytest
from jitney.errors import InvalidArgumentError
from jitney.sweep import record, slo
from jitney.sweep.compare import write_comparison
from jitney.sweep.drawing import short
from jitney.sweep.profile import Exchange, measure, read_export
from jitney.sweep.record import EngineWork, Load, Point, Result, Stage
from jitney.sweep.report import write_report
from jitney.sweep.sweep import line
from msgspec.structs import replace

from tests.sweep.exports import calls, write_export

SLO = "latency-p95=50ms"
FAILURE = "perf_analyzer ended with status 99: <script>&"


def result(points: tuple[Point, ...], *, language: bool, bounds: str = SLO) -> Result:
    verdicts = tuple(slo.judge(p, slo.parse(bounds, language=language)) for p in points)
    return Result(
        title="a <b>title</b> & more",
        model="m",
        language=language,
        address="here:8001",
        server="triton 2.51.0",
        perf_analyzer="2.48.0",
        began="2026-01-01T00:00:00+00:00",
        options={"seconds": "3.0"},
        points=points,
        slo=bounds,
        verdicts=verdicts,
        best=slo.best(points, verdicts),
    )


@pytest.fixture
def calls_result() -> Result:
    stage = Stage("part", 100, 20, 0.002, 0.005, {1: 5, 8: 15})
    return result(
        (
            Point(
                Load("concurrency", 1), "steady", (),
                measure(calls(100, 0.01, 0.01), language=False), (stage,),
            ),
            Point(
                Load("concurrency", 4), "unstable", ("it wavered",),
                measure(calls(100, 0.004, 0.08), language=False), (stage,),
            ),
            Point(Load("rate", 9), "failed", (FAILURE,)),
        ),
        language=False,
    )  # fmt: skip


@pytest.fixture
def language_result(tmp_path: Path) -> Result:
    streams = [
        (100 * i, [(100 * i + 20, 1), (100 * i + 40, 2), (100 * i + 90 + i, 3)]) for i in range(9)
    ]
    found = measure(read_export(write_export(tmp_path / "p.json", streams)), language=True)
    work = EngineWork(40, (1.0, 2.0), (30.0, 10.0, 0.0), 1.25, 0.004, 450, 54, 16, 2)
    point = Point(Load("concurrency", 1), "steady", (), found, (), work)
    return result((point,), language=True, bounds="ttft-p95=25ms")


def parsed(page: Path) -> ET.Element:
    """Well-formed, or an error."""
    text = page.read_text(encoding="utf-8")
    assert text.startswith("<!DOCTYPE html>\n")
    return ET.fromstring(text.removeprefix("<!DOCTYPE html>\n"))


def check_alone(page: Path, pictures: set[str]) -> str:
    """No script, nothing from elsewhere, every figure inside and beside it; returns the text."""
    root = parsed(page)
    assert not list(root.iter("script"))
    addresses = [e.get(a) for e in root.iter() for a in ("src", "href") if e.get(a)]
    assert all(address.startswith("data:") for address in addresses)
    assert not re.search(r"url\(|@import", page.read_text(encoding="utf-8"))
    images = list(root.iter("img"))
    assert len(images) == len(pictures)
    for image in images:
        assert image.get("alt")
        svg = ET.fromstring(base64.b64decode(image.get("src").partition("base64,")[2]))
        assert svg.tag.endswith("svg")
        assert len(list(svg.iter())) > 50, "something is drawn"
    assert {path.stem for path in page.parent.glob("*.png")} == pictures
    for path in page.parent.glob("*.png"):
        assert path.read_bytes().startswith(b"\x89PNG")
    return " ".join("".join(root.find("body").itertext()).split())


def test_the_page_of_a_model_of_one_call(calls_result: Result, tmp_path: Path) -> None:
    page = write_report(calls_result, tmp_path / "out")
    text = check_alone(page, {"throughput", "load", "latency", "batches", "queue"})
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
    names = {"throughput", "load", "ttft", "itl", "latency", "batches", "queue"}
    text = check_alone(page, names)
    percentiles = next(t for t in parsed(page).iter("table") if "p50" in "".join(t.itertext()))
    row = ["".join(cell.itertext()) for cell in list(percentiles.iter("tr"))[-1]]
    assert row[:4] == ["1 at once", "20.0", "20.0", "20.0"]
    assert "found in the prefix cache" in text
    assert "1.25" in text


def test_a_best_load_with_a_caution_is_not_green(calls_result: Result, tmp_path: Path) -> None:
    doubtful = replace(calls_result, best=replace(calls_result.best, caution="it wavered"))
    page = write_report(doubtful, tmp_path / "out")
    assert [p for p in parsed(page).iter("p") if p.get("class") == "best caution"]


def test_a_sweep_without_any_figure_still_has_its_page(tmp_path: Path) -> None:
    nothing = result((Point(Load("rate", 9), "failed", ("why",)),), language=False)
    page = write_report(nothing, tmp_path)
    text = " ".join("".join(parsed(page).itertext()).split())
    assert "No load could be measured." in text
    assert "why" in text


def test_the_file_gives_back_the_result(calls_result: Result, tmp_path: Path) -> None:
    record.write(calls_result, tmp_path / "r.json")
    assert record.read(tmp_path / "r.json") == calls_result


@pytest.mark.parametrize("text", [None, "{}", "nothing", '{"points": 3}'])
def test_another_file_is_refused(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "r.json").write_text(text, encoding="utf-8")
    with pytest.raises(InvalidArgumentError, match=r"r\.json"):
        record.read(tmp_path / "r.json")


def test_a_file_of_another_version_is_refused(calls_result: Result, tmp_path: Path) -> None:
    record.write(replace(calls_result, version=99), tmp_path / "r.json")
    with pytest.raises(InvalidArgumentError, match="version 99"):
        record.read(tmp_path / "r.json")
    # One of which nothing else can be read.
    (tmp_path / "r.json").write_text('{"version": 2, "loads": []}', encoding="utf-8")
    with pytest.raises(InvalidArgumentError, match="version 2, but must be of 1"):
        record.read(tmp_path / "r.json")


def test_a_file_with_other_quantiles_is_refused(calls_result: Result, tmp_path: Path) -> None:
    record.write(calls_result, tmp_path / "r.json")
    said = json.loads((tmp_path / "r.json").read_text(encoding="utf-8"))
    said["points"][0]["measured"]["latency"]["quantiles"].pop()
    (tmp_path / "r.json").write_text(json.dumps(said), encoding="utf-8")
    with pytest.raises(InvalidArgumentError, match="102 quantiles, but must be 103"):
        record.read(tmp_path / "r.json")


def test_two_results_side_by_side(calls_result: Result, tmp_path: Path) -> None:
    faster = Point(
        Load("concurrency", 1), "steady", (), measure(calls(100, 0.005, 0.005), language=False)
    )
    later = replace(calls_result, points=(faster,), options={"seconds": "9.0"})
    page = write_comparison(calls_result, later, tmp_path / "out")
    text = check_alone(page, {"throughput", "load", "latency", "queue"})
    assert "more (A)" in text
    assert "more (B)" in text
    assert re.search(r"100\.0\s?200\.0\s?2\.00", text), "throughputs and their ratio"
    marks = {e.text: e.get("class") for e in parsed(page).iter("td")}
    assert marks["2.00"] == "better"
    assert "measured with different options" in text


def spoken(level: float, exchanges: Sequence[Exchange]) -> Point:
    """Of a language model."""
    return Point(Load("concurrency", level), "steady", (), measure(exchanges, language=True))


ONE_TOKEN = [Exchange(i * 0.1, (i * 0.1 + 0.02,), (1,), i * 0.1 + 0.02) for i in range(20)]
NO_TIME = [Exchange(i * 0.1, (i * 0.1,) * 2, (1, 2), i * 0.1) for i in range(20)]
SOME = [Exchange(i * 0.1, (i * 0.1 + 0.02, i * 0.1 + 0.03), (1, 2), i * 0.1 + 0.03)
        for i in range(20)]  # fmt: skip


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("exchanges", [ONE_TOKEN, NO_TIME], ids=["one token", "no time"])
def test_times_that_are_not_there_or_zero(exchanges: list[Exchange], tmp_path: Path) -> None:
    """Answers of one token have nothing between tokens; a logarithm shows no zero."""
    alone = result((spoken(1, exchanges),), language=True, bounds="")
    text = " ".join("".join(parsed(write_report(alone, tmp_path / "a")).itertext()).split())
    assert "Best with no bound" in text
    other = replace(alone, title="other", points=(spoken(1, SOME),))
    for pair in ((alone, other), (other, alone)):
        assert "Loads of both" in "".join(parsed(write_comparison(*pair, tmp_path)).itertext())


@pytest.mark.filterwarnings("error")
def test_results_that_have_no_load_in_common(calls_result: Result, tmp_path: Path) -> None:
    nothing = replace(calls_result, title="b", points=calls_result.points[-1:], best=None)
    page = write_comparison(calls_result, nothing, tmp_path)
    assert "no load that both have figures of" in "".join(parsed(page).itertext())
    page = write_comparison(nothing, replace(nothing, title="c"), tmp_path)
    assert "No load could be measured." in "".join(parsed(page).itertext())


@pytest.mark.parametrize("title", [r"for $5 \frac{ $", r"_b $\x$", "bell \x07 \x1b[31m", "\udcff"])
def test_any_title_is_drawn(title: str, calls_result: Result, tmp_path: Path) -> None:
    """No mathematics, no legend without it, nothing that XML may not have."""
    stage = Stage("a&b <i>", 100, 20, 0.002, 0.005, {1: 5, 8: 15})
    hostile = replace(
        calls_result, title=title, model=title, verdicts=calls_result.verdicts[:1],
        points=(replace(calls_result.points[0], stages=(stage,), remarks=(title,)),),
    )  # fmt: skip
    names = {"throughput", "load", "latency", "batches", "queue"}
    text = check_alone(write_report(hostile, tmp_path / "one"), names)
    assert "a&b <i>" in text, "escaped, and once"
    page = write_comparison(hostile, replace(hostile, title="other"), tmp_path / "two")
    check_alone(page, names - {"batches"})


def test_a_name_with_an_underscore_is_in_the_legend() -> None:
    assert short("_b").strip() == "_b"
    assert not short("_b").startswith("_")


def test_what_cannot_be_compared(
    calls_result: Result, language_result: Result, tmp_path: Path
) -> None:
    with pytest.raises(InvalidArgumentError, match="only one is a language model"):
        write_comparison(calls_result, language_result, tmp_path)


def test_quantiles_between_those_kept(calls_result: Result) -> None:
    found = measure(calls(100, 0.01, 0.01), language=False).latency
    assert found.at(97.25) == pytest.approx(0.01)
    assert found.at(99.7) == pytest.approx(0.01)


def test_the_terminal_says_the_same(calls_result: Result) -> None:
    steady, unstable, failed = (line(point, language=False) for point in calls_result.points)
    assert "100.0 rows/s" in steady
    assert "[yellow]unstable" in unstable
    assert "it wavered" in unstable
    assert "[red]failed" in failed
