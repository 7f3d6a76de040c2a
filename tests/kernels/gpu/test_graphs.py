"""Which graph a decode step takes: padded rows and a longest context that is never too short."""

import logging
from collections.abc import Hashable

import pytest

pytest.importorskip("triton")
from hypothesis import given
from hypothesis import strategies as st
from jitney.kernels.gpu.capture import Capture, CaptureError, Work
from jitney.kernels.gpu.graphs import DecodeGraphs, GraphKey, context_limits, padded_sizes


class FakeCapture:
    """Captures nothing: what it gives runs the work again."""

    def __init__(self) -> None:
        self.captures = 0
        self.replays = 0

    def __call__(self, work: Work) -> Work:
        work()  # the run before a capture
        self.captures += 1

        def replay() -> None:
            self.replays += 1
            work()

        return replay


def fail_to_capture(work: Work) -> Work:
    work()
    raise CaptureError("operation not permitted when stream is capturing")


def by_parts(rows: int, longest: int) -> Hashable:
    """Plans as an attention makes them: more parts for longer contexts, fewer for more rows."""
    return max(1, min(8, longest // 1024, 64 // rows))


def graphs(capture: Capture | None, sizes: list[int], longest: int = 8192) -> DecodeGraphs:
    return DecodeGraphs(capture, sizes, longest, by_parts)


@pytest.mark.parametrize(
    ("option", "max_rows", "expected"),
    [
        (None, 1, [1]),
        (None, 5, [1, 2, 4, 5]),
        (None, 16, [1, 2, 4, 8, 16]),
        (None, 60, [1, 2, 4, 8, 16, 32, 48, 60]),
        ((9, 3, 3), 16, [3, 9]),
        ((), 16, []),
    ],
)
def test_sizes(option, max_rows: int, expected: list[int]) -> None:
    assert padded_sizes(option, max_rows) == expected


def test_large_steps_have_no_graph_by_default() -> None:
    assert padded_sizes(None, 4096)[-1] == 512


def test_limits_of_one_plan_are_one() -> None:
    assert context_limits(64, 8192, by_parts) == [8192]
    # 16 rows: up to 4 parts, so 512 and 1024 are one, 2048 and 4096 are two, 8192 is as 4096
    assert context_limits(16, 8192, by_parts) == [1024, 2048, 8192]
    assert context_limits(1, 100, by_parts) == [100]
    assert context_limits(1, 8000, lambda rows, longest: longest) == [512, 1024, 2048, 4096, 8000]


@given(st.integers(1, 64), st.integers(1, 8192))
def test_no_step_gets_a_graph_too_small_for_it(rows: int, longest: int) -> None:
    """And the plan that is baked in is that of the step's own longest context."""
    key = graphs(FakeCapture(), padded_sizes(None, 64)).key(rows, longest)
    assert key is not None
    assert key.rows >= rows
    assert key.limit >= longest
    bucket = max(512, 1 << (longest - 1).bit_length())
    assert by_parts(key.rows, key.limit) == by_parts(key.rows, bucket)


def test_steps_that_have_no_graph() -> None:
    some = graphs(FakeCapture(), [4, 8])
    assert some.key(9, 10) is None
    assert some.key(3, 8193) is None
    assert graphs(None, [4, 8]).key(3, 10) is None
    assert graphs(FakeCapture(), []).key(1, 1) is None


def test_a_key_is_captured_once_and_replayed() -> None:
    capture = FakeCapture()
    some = graphs(capture, [4, 16])
    runs: list[GraphKey] = []
    for longest in (600, 1024, 1025, 700, 5000):
        key = some.key(10, longest)
        assert key is not None
        some.run(key, longest, runs.append)
    limits = [key.limit for key in runs]
    # each key's first step runs once before its capture and once as its replay
    assert limits == [1024, 1024, 1024, 2048, 2048, 1024, 8192, 8192]
    assert (capture.captures, len(some)) == (3, 3)


def test_a_stale_longest_context_is_an_error_not_a_wrong_result() -> None:
    some = graphs(FakeCapture(), [16])
    key = some.key(16, 1000)
    assert key is not None
    ran: list[GraphKey] = []
    some.run(key, 1000, ran.append)
    with pytest.raises(AssertionError, match="longest context is stale"):
        some.run(key, 1025, ran.append)
    assert len(ran) == 2


def test_all_keys_the_largest_first() -> None:
    keys = graphs(FakeCapture(), [4, 16]).keys()
    assert keys[0] == GraphKey(16, 8192)
    assert keys == sorted(keys, key=lambda key: (key.rows, key.limit), reverse=True)
    some = graphs(FakeCapture(), [4, 16])
    assert {some.key(rows, n) for rows in range(1, 17) for n in range(1, 8193, 7)} == set(keys)


def test_what_cannot_be_captured_runs_kernel_by_kernel(caplog: pytest.LogCaptureFixture) -> None:
    some = graphs(fail_to_capture, [4])
    key = some.key(2, 5)
    assert key is not None
    ran: list[GraphKey] = []
    with caplog.at_level(logging.WARNING, logger="jitney"):
        some.run(key, 5, ran.append)
        some.run(key, 5, ran.append)
    assert ran == [key, key, key]  # tried once, then twice as it is
    assert [record.message for record in caplog.records] == [
        "decode steps run without CUDA graphs: operation not permitted when stream is capturing"
    ]
    assert some.key(2, 5) is None
    assert some.keys() == []


def test_a_step_that_raises_before_its_capture_costs_no_graphs() -> None:
    """A fault of the step's own is not taken for a module that cannot be captured."""
    some = graphs(FakeCapture(), [4])
    key = some.key(2, 5)
    assert key is not None

    def fault(_: GraphKey) -> None:
        raise ValueError("the step's own")

    with pytest.raises(ValueError, match="own"):
        some.run(key, 5, fault)
    some.run(key, 5, lambda _: None)
    assert len(some) == 1
