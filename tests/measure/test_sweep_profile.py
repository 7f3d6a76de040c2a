"""What an export says: throughput, times, tokens, steadiness."""

from pathlib import Path

import pytest
from jitney.errors import InternalError
from jitney_measure import loads
from jitney_measure.exchanges import Exchange, measure, read_export
from jitney_measure.record import Load

from tests.measure.exports import OPTIONS, calls, point, write_export


def test_a_stream_whose_responses_hold_several_tokens(tmp_path: Path) -> None:
    path = write_export(
        tmp_path / "p.json",
        [(0, [(30, 1), (50, 2), (90, 4), (91, None)]), (100, [(110, 1), (140, 1)])],
    )
    exchanges = read_export(path)
    assert [e.tokens for e in exchanges] == [(1, 2, 4), (1, 1)]
    found = measure(exchanges, language=True)
    assert found.tokens_from == "counts"
    assert found.input_tokens_mean == 50
    assert found.output_tokens == 9
    assert found.ttft.mean == pytest.approx(0.020)
    assert sorted([found.gap.at(0), found.gap.at(100)]) == pytest.approx([0.020, 0.040])
    # Gaps of 20 ms for 2 tokens, 40 for 4 and 30 for one: six of 10 ms and one of 30.
    assert found.itl.count == 7
    assert found.itl.at(50) == pytest.approx(0.010)
    assert found.itl.at(100) == pytest.approx(0.030)
    assert found.tpot.mean == pytest.approx((0.060 / 6 + 0.030) / 2)
    # The empty final response ends the request; it is no token.
    assert found.latency.at(100) == pytest.approx(0.091)


def test_without_counts_each_response_is_a_token(tmp_path: Path) -> None:
    path = write_export(tmp_path / "p.json", [(0, [(5, "a"), (9, "b"), (9, None)])])
    found = measure(read_export(path), language=True)
    assert found.tokens_from == "responses"
    assert found.output_tokens == 2
    assert found.input_tokens_mean is None


def test_throughput_is_of_the_time_in_which_the_load_was_whole() -> None:
    """Ten users' last requests run on alone: what they take does not count."""
    exchanges = [*calls(100, 0.010, 0.010), Exchange(0.5, (9.0,), None, 9.0)]
    found = measure(exchanges, language=False, rows=4)
    assert found.window_s == pytest.approx(0.99)
    assert found.throughput == pytest.approx(99 * 4 / 0.99)
    assert found.requests_per_s == pytest.approx(100)
    assert found.latency.at(100) == pytest.approx(8.5)


def test_all_sent_at_once_are_measured_to_the_last_answer() -> None:
    found = measure([Exchange(0.0, (1.0,), None, 1.0)] * 8, language=False)
    assert found.requests_per_s == pytest.approx(8)


def test_failed_requests_are_counted_and_no_answer_at_all_is_an_error(tmp_path: Path) -> None:
    path = write_export(tmp_path / "p.json", [(0, [(5, "a")]), (1, []), (2, [(3, None)])])
    found = measure(read_export(path), language=False)
    assert (found.requests, found.failed) == (3, 2)
    judged = point(Load("concurrency", 1), found)
    assert judged.state == "failed"
    assert "2 of 3 requests failed" in judged.remarks
    with pytest.raises(InternalError, match="none of 1 requests"):
        measure([Exchange(0.0, (), None, None)], language=False)


@pytest.mark.parametrize("text", ["", "{", '{"experiments": []}', "[1]"])
def test_a_broken_export_is_one_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "p.json").write_text(text, encoding="utf-8")
    with pytest.raises(InternalError, match="cannot be read"):
        read_export(tmp_path / "p.json")


def test_an_even_run_is_steady_and_a_slowing_one_is_not() -> None:
    load = Load("concurrency", 1)
    even = point(load, measure(calls(90, 0.010, 0.010), language=False))
    assert (even.state, even.remarks) == ("steady", ())
    moment, slowing = 0.0, []
    for i in range(90):
        lasting = 0.010 * (1 + i / 30)
        slowing.append(Exchange(moment, (moment + lasting,), None, moment + lasting))
        moment += lasting
    found = point(load, measure(slowing, language=False))
    assert found.state == "unstable"
    assert any("throughput in thirds" in remark for remark in found.remarks)
    assert any("median latency" in remark for remark in found.remarks)
    assert found.measured is not None, "reported, not dropped"


def test_a_queue_that_grows_is_behind_and_requests_under_way_are_not() -> None:
    load = Load("rate", 100)
    growing = [Exchange(i * 0.01, (i * 0.02 + 0.02,), None, i * 0.02 + 0.02) for i in range(300)]
    found = point(load, measure(growing, language=False))
    assert found.state == "behind"
    assert any("under way at the end" in remark for remark in found.remarks)
    # 50 under way throughout: slow, but kept up with.
    assert point(load, measure(calls(600, 0.01, 0.5), language=False)).state == "steady"


def test_a_rate_that_was_not_sent_is_said() -> None:
    found = point(Load("rate", 200), measure(calls(300, 0.01, 0.001), language=False))
    assert found.state == "unstable"
    assert "perf_analyzer sent 100.0 requests/s" in found.remarks


def test_how_many_requests_fill_the_seconds() -> None:
    assert loads.request_count(OPTIONS, Load("concurrency", 1), 70.0) == 70
    assert loads.request_count(OPTIONS, Load("concurrency", 32), 7.0) == 128, (
        "four rounds of each user"
    )
    assert loads.request_count(OPTIONS, Load("concurrency", 1), 1e9) == 20_000
