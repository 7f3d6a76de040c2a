"""The values that are tried: those given, checked, or a few that can matter."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jitney.errors import InvalidArgumentError
from jitney.tune import candidates
from jitney.tune.setting import label
from jitney.tune.space import engine_space, scheduler_space

NOTHING = dict.fromkeys(
    ("batch_sizes", "windows", "instances", "max_num_seqs", "token_budgets"), ""
)


def test_given_values() -> None:
    assert candidates.whole("batch_sizes", "16, 1,4,4", 1, 64) == (1, 4, 16)
    assert candidates.windows("windows", "2ms,0,500us,0.5ms,1s") == (0, 500, 2000, 1_000_000)
    assert candidates.duration("budget", "90s") == 90
    assert candidates.duration("budget", "1.5h") == 5400


@pytest.mark.parametrize("text", ["", "0", "65", "4,x", "4,,8", "-1", "1.5", "²"])
def test_a_wrong_batch_size_is_named_with_its_bound(text: str) -> None:
    with pytest.raises(InvalidArgumentError, match="from 1 to 64, max_batch_size"):
        candidates.whole("batch_sizes", text, 1, 64, ", max_batch_size")


@pytest.mark.parametrize("text", ["", "5", "11s", "2 m", "1,-1us"])
def test_a_wrong_window(text: str) -> None:
    with pytest.raises(InvalidArgumentError, match=r"windows is .* like 500us or 2ms"):
        candidates.windows("windows", text)


@pytest.mark.parametrize("text", ["", "10", "0s", "ten minutes", "30d"])
def test_a_wrong_duration(text: str) -> None:
    with pytest.raises(InvalidArgumentError, match=r"budget is .* like 90s, 10m or 1h"):
        candidates.duration("budget", text)


@settings(deadline=None)
@given(
    st.integers(1, 512).flatmap(lambda most: st.tuples(st.integers(1, most), st.just(most))),
    st.integers(0, 10_000),
    st.integers(1, 8),
    st.floats(1e-4, 10) | st.none(),
    st.integers(1, 64),
)
def test_defaults_of_a_scheduler(
    sizes: tuple[int, int], window: int, instances: int, tightest: float | None, cores: int
) -> None:
    """The current setting is among them, nothing is out of its bounds, and they are few."""
    batch, most = sizes
    space = scheduler_space((batch, window, instances), NOTHING, most, tightest, cores)
    for axis, value in zip(space.axes, space.current, strict=True):
        assert value in axis.values
        assert list(axis.values) == sorted(set(axis.values))
        assert 1 <= len(axis.values) <= 7
    batches, windows, counts = (axis.values for axis in space.axes)
    assert batches[0] == 1
    assert batches[-1] == most
    assert windows[0] == 0
    assert all(w * 1e-6 < tightest / 2 for w in windows if tightest and w not in (0, window))
    assert {1, 2} <= set(counts)
    assert max(counts) <= max(4, instances)


@settings(deadline=None)
@given(st.integers(1, 4096), st.integers(1, 1 << 16), st.integers(1, 256), st.booleans())
def test_defaults_of_an_engine(sequences: int, tokens: int, load: int, gpu: bool) -> None:
    space = engine_space((sequences, tokens), NOTHING, greatest_load=load, gpu=gpu)
    for axis, value in zip(space.axes, space.current, strict=True):
        assert value in axis.values
    others = set(space.axes[0].values) - {sequences}
    assert max(others | {4}) < 4 * max(4, load), "no sequences that no load ever needs"
    assert all(value >= 4 for value in others)


def test_what_is_given_takes_the_place_of_the_defaults() -> None:
    given_ = NOTHING | {"batch_sizes": "2,8", "windows": "1ms", "instances": "3"}
    space = scheduler_space((64, 500, 1), given_, 64, 1e-3, 2)
    assert [axis.values for axis in space.axes] == [(2, 8), (1000,), (3,)]
    assert all(axis.given for axis in space.axes)
    assert space.size() == 3  # and the current one


def test_several_groups_of_instances_are_left_alone() -> None:
    space = scheduler_space((64, 500, 2), NOTHING, 64, None, 8, counts=False)
    assert space.axes[2].values == (2,)


@pytest.mark.parametrize(
    ("values", "best", "made"),
    [
        ((1, 4, 16, 64), 16, (8, 16, 32)),
        ((0, 500, 2000), 0, (0, 250)),
        ((0, 500, 2000), 500, (250, 500, 1000)),
        ((1, 2), 2, (1, 2)),
        ((1, 2, 4), 2, (1, 2, 3)),
        ((4,), 7, (5, 7)),
    ],
)
def test_halfway_to_the_neighbours(
    values: tuple[int, ...], best: int, made: tuple[int, ...]
) -> None:
    assert candidates.midpoints(values, best) == made


def test_labels() -> None:
    assert label({"batch_size": 8, "window_us": 2500, "instances": 1}) == (
        "batch 8, window 2500us, 1 instance"
    )
    assert label({"window_us": 2000, "instances": 2}) == "window 2ms, 2 instances"
    assert label({"window_us": 0}) == "window 0"
    assert label({"max_num_seqs": 64}) == "max_num_seqs 64"
