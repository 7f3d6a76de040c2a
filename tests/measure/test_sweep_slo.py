"""Bounds, verdicts and the best setting; loads and other words of the command line."""

import pytest
from jitney.errors import InvalidArgumentError
from jitney_measure import loads, slo
from jitney_measure.exchanges import Exchange, measure
from jitney_measure.inputs import read_shapes
from jitney_measure.options import Shared
from jitney_measure.record import Load, LoadPoint, LoadState, Result

from tests.measure.exports import calls, result_of


def made(level: float, latency_s: float, every_s: float, state: LoadState = "steady") -> LoadPoint:
    measured = measure(calls(100, every_s, latency_s), language=False)
    return LoadPoint(Load("concurrency", level), state, (), measured)


def judged(bounds: str, *points: LoadPoint) -> Result:
    return result_of(points, language=False, bounds=bounds)


def test_bounds_are_read() -> None:
    bounds = slo.parse("ttft-p95=200ms, itl-mean=50us,latency-p99.9=1.5s", language=True)
    assert bounds == (
        slo.Bound(slo.Statistic("ttft", 95.0), 0.2),
        slo.Bound(slo.Statistic("itl", None), pytest.approx(5e-5)),
        slo.Bound(slo.Statistic("latency", 99.9), 1.5),
    )
    assert slo.parse("", language=False) == ()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("ttft-p95", "like ttft-p95=200ms"),
        ("ttft-p95=200", "us, ms or s"),
        ("tftt-p95=1s", "did you mean 'ttft'"),
        ("latency-p101=1s", "a percentile to 100"),
        ("latency-p9.9.9=1s", "like ttft-p95=200ms"),
        ("latency-p95=0ms", "more than 0"),
    ],
)
def test_what_is_no_bound_is_refused(text: str, words: str) -> None:
    with pytest.raises(InvalidArgumentError, match=words):
        slo.parse(text, language=True)
    with pytest.raises(InvalidArgumentError, match="makes no tokens"):
        slo.parse("ttft-p95=1s", language=False)


def test_the_best_is_the_largest_throughput_within_the_bounds() -> None:
    points = [made(1, 0.010, 0.010), made(4, 0.020, 0.004), made(8, 0.080, 0.002)]
    found = judged("latency-p95=50ms", *points)
    assert [verdict.over for verdict in found.verdicts] == [(), (), ("latency-p95 is 80 ms",)]
    assert found.best is not None
    assert (found.best.load.level, found.best.caution) == (4, "")
    assert judged("latency-p50=1ms", *points).best is None


def test_an_unstable_point_is_not_dropped_and_not_trusted() -> None:
    steady, more = made(1, 0.01, 0.01), made(4, 0.01, 0.004, "unstable")
    best = judged("", steady, more).best
    assert best is not None
    assert best.load.level == 1
    assert "4 at once gave more" in best.caution
    only = judged("", more).best
    assert only is not None
    assert only.load.level == 4
    assert "steadily" in only.caution


@pytest.mark.parametrize("state", ["behind", "failed"])
def test_a_load_that_was_not_kept_up_with_meets_no_bound(state: LoadState) -> None:
    found = judged("latency-p99=9s", made(1, 0.001, 0.01, state))
    assert found.verdicts[0].over == (state,)
    assert found.best is None


def test_a_time_that_was_not_measured_meets_no_bound() -> None:
    one_response = measure([Exchange(0.0, (1.0,), (1,), 1.0)] * 3, language=True)
    point = LoadPoint(Load("concurrency", 1), "steady", (), one_response)
    verdict = slo.judge(point, slo.parse("itl-p95=1s", language=True))
    assert verdict.over == ("itl-p95 was not measured",)


def test_times_are_shown_with_three_digits() -> None:
    shown = {
        None: "–", 0.0005: "500 µs", 0.0009997: "1 ms", 0.0123456: "12.3 ms", 0.9997: "1 s",
        59.5: "59.5 s", 1234.4: "1,234 s",
    }  # fmt: skip
    assert [slo.show_time(seconds) for seconds in shown] == list(shown.values())


def test_loads_are_read() -> None:
    assert loads.read_loads(Shared(concurrency="8,1,8", rate="0.5"), "2") == (
        Load("concurrency", 1), Load("concurrency", 8), Load("rate", 0.5),
    )  # fmt: skip
    assert loads.read_loads(Shared(), "1, 2") == (Load("concurrency", 1), Load("concurrency", 2))
    assert loads.read_loads(Shared(rate="3"), "1,2") == (Load("rate", 3),)
    assert [str(load) for load in loads.read_loads(Shared(rate="0.5"), "")] == ["0.5/s"]
    for wrong in ({"concurrency": "0"}, {"concurrency": "1.5"}, {"rate": "-1"}, {"rate": "nan"},
                  {"concurrency": "x"}, {"concurrency": "1,,2"}):  # fmt: skip
        with pytest.raises(InvalidArgumentError, match=f"{next(iter(wrong))} is .* with commas"):
            loads.read_loads(Shared(**wrong), "1")


def test_spans_and_shapes_are_read() -> None:
    assert loads.span("input_tokens", "8:64") == (8, 64)
    assert loads.span("input_tokens", "8") == (8, 8)
    assert read_shapes(["a:b:2,3"]) == {"a:b": (2, 3)}
    for text in ("0", "5:1", "1:2:3", "x", ""):
        with pytest.raises(InvalidArgumentError, match="LOW:HIGH"):
            loads.span("input_tokens", text)
    for text in ("a", "a:", "a:-1", "a:0"):
        with pytest.raises(InvalidArgumentError, match="NAME:SIZE"):
            read_shapes([text])
