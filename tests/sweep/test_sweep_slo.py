"""Bounds, verdicts and the best setting; loads and other words of the command line."""

import pytest
from jitney.errors import InvalidArgumentError
from jitney.sweep import plan, slo
from jitney.sweep.inputs import read_shapes
from jitney.sweep.profile import Exchange, measure
from jitney.sweep.record import Load, Measurement, Point, State

from tests.sweep.exports import calls


def made(level: float, latency_s: float, every_s: float, state: State = "steady") -> Point:
    measured = measure(calls(100, every_s, latency_s), language=False)
    return Point(Load("concurrency", level), state, (), measured)


def test_bounds_are_read() -> None:
    bounds = slo.parse("ttft-p95=200ms, itl-mean=50us,latency-p99.9=1.5s", language=True)
    assert [(b.time, b.percent, b.seconds) for b in bounds] == [
        ("ttft", 95.0, 0.2), ("itl", None, pytest.approx(5e-5)), ("latency", 99.9, 1.5),
    ]  # fmt: skip
    assert slo.parse("", language=False) == ()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("ttft-p95", "like ttft-p95=200ms"),
        ("ttft-p95=200", "unit us, ms or s"),
        ("tftt-p95=1s", "did you mean 'ttft'"),
        ("latency-p101=1s", "0 to 100"),
        ("latency-p9.9.9=1s", "a number"),
        ("latency-p95=0ms", "more than 0"),
    ],
)
def test_what_is_no_bound_is_refused(text: str, words: str) -> None:
    with pytest.raises(InvalidArgumentError, match=words.replace("(", r"\(")):
        slo.parse(text, language=True)


def test_token_times_are_refused_for_a_model_without_tokens() -> None:
    with pytest.raises(InvalidArgumentError, match="makes no tokens"):
        slo.parse("ttft-p95=1s", language=False)


def test_the_best_is_the_largest_throughput_within_the_bounds() -> None:
    points = [made(1, 0.010, 0.010), made(4, 0.020, 0.004), made(8, 0.080, 0.002)]
    bounds = slo.parse("latency-p95=50ms", language=False)
    verdicts = [slo.judge(point, bounds) for point in points]
    assert [verdict.over for verdict in verdicts] == [(), (), ("latency-p95 is 80 ms",)]
    best = slo.best(points, verdicts)
    assert best is not None
    assert (best.load.level, best.caution) == (4, "")
    none = slo.parse("latency-p50=1ms", language=False)
    assert slo.best(points, [slo.judge(point, none) for point in points]) is None


def test_an_unstable_point_is_not_dropped_and_not_trusted() -> None:
    steady, more = made(1, 0.01, 0.01), made(4, 0.01, 0.004, "unstable")
    best = slo.best([steady, more], [slo.judge(point, ()) for point in (steady, more)])
    assert best is not None
    assert best.load.level == 1
    assert "4 at once gave more" in best.caution
    only = slo.best([more], [slo.judge(more, ())])
    assert only is not None
    assert only.load.level == 4
    assert "steadily" in only.caution


@pytest.mark.parametrize("state", ["behind", "failed"])
def test_a_load_that_was_not_kept_up_with_meets_no_bound(state: State) -> None:
    point = made(1, 0.001, 0.01, state)
    verdict = slo.judge(point, slo.parse("latency-p99=9s", language=False))
    assert verdict.over == (state,)
    assert slo.best([point], [verdict]) is None


def test_a_time_that_was_not_measured_meets_no_bound() -> None:
    one_response: Measurement = measure([Exchange(0.0, (1.0,), (1,), 1.0)] * 3, language=True)
    point = Point(Load("concurrency", 1), "steady", (), one_response)
    verdict = slo.judge(point, slo.parse("itl-p95=1s", language=True))
    assert verdict.over == ("itl-p95 was not measured",)


def test_loads_are_read() -> None:
    assert plan.loads("8,1,8", "0.5") == (
        Load("concurrency", 1), Load("concurrency", 8), Load("rate", 0.5),
    )  # fmt: skip
    assert [str(load) for load in plan.loads("8", "0.5")] == ["8 at once", "0.5/s"]
    for concurrency, rate in (("0", ""), ("1.5", ""), ("", "-1"), ("x", ""), ("", "nan")):
        with pytest.raises(InvalidArgumentError):
            plan.loads(concurrency, rate)
    with pytest.raises(InvalidArgumentError, match="--concurrency or --rate"):
        plan.loads("", "")


def test_spans_and_shapes_are_read() -> None:
    assert plan.span("input_tokens", "8:64") == (8, 64)
    assert plan.span("input_tokens", "8") == (8, 8)
    assert read_shapes(["a:b:2,3"]) == {"a:b": (2, 3)}
    for text in ("0", "5:1", "1:2:3", "x", ""):
        with pytest.raises(InvalidArgumentError, match="LOW:HIGH"):
            plan.span("input_tokens", text)
    for text in ("a", "a:", "a:-1", "a:0"):
        with pytest.raises(InvalidArgumentError, match="NAME:SIZE"):
            read_shapes([text])
