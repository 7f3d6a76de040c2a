"""The values that are tried, and the order of a search."""

from collections.abc import Callable
from itertools import count
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jitney.errors import InvalidArgumentError
from jitney_measure.axes import (
    BATCH,
    INSTANCES,
    SEQUENCES,
    TOKENS,
    WINDOW,
    Axes,
    AxisOptions,
    Score,
    Search,
    Setting,
    scheduler_axes,
)


def given_axes(**texts: str) -> Axes:
    return scheduler_axes(
        (64, 500, 1),
        AxisOptions(**texts),
        max_batch=64,
        tightest_s=1e-3,
        cores=2,
        can_change_instances=True,
    )


def test_what_is_given_takes_the_place_of_the_defaults() -> None:
    axes = given_axes(batch_sizes="16, 1,4,4", windows="2ms,0,500us,0.5ms,1s", instances="3")
    assert list(axes.values()) == [(1, 4, 16), (0, 500, 2000, 1_000_000), (3,)]


@pytest.mark.parametrize("text", ["0", "65", "4,x", "4,,8", "-1", "1.5", "²"])
def test_a_wrong_batch_size_is_named_with_its_bound(text: str) -> None:
    with pytest.raises(InvalidArgumentError, match="from 1 to 64, max_batch_size"):
        given_axes(batch_sizes=text)
    with pytest.raises(InvalidArgumentError, match=r"windows is .* like 500us or 2ms"):
        given_axes(windows=f"{text},11s")


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
    current = (batch, window, instances)
    axes = scheduler_axes(
        current,
        AxisOptions(),
        max_batch=most,
        tightest_s=tightest,
        cores=cores,
        can_change_instances=True,
    )
    for values, value in zip(axes.values(), current, strict=True):
        assert value in values
        assert list(values) == sorted(set(values))
        assert 1 <= len(values) <= 7
    batches, windows, counts = axes.values()
    assert (batches[0], batches[-1], windows[0]) == (1, most, 0)
    assert all(w * 1e-6 < tightest / 2 for w in windows if tightest and w not in (0, window))
    assert {1, 2} <= set(counts)
    assert max(counts) <= max(4, instances)


# ------------------------------------------------------------------ the search


def walk(axes: Axes, current: Setting, worth: Callable[[Setting], float]) -> dict[Setting, Score]:
    """All that a search tries, in its order, the current setting first."""
    scores: dict[Setting, Score] = {current: Score(2, worth(current))}
    search = Search(axes, current, scores[current])
    while (setting := search.next()) is not None:
        assert setting not in scores, "tried twice"
        scores[setting] = Score(2, worth(setting))
        search.report(setting, scores[setting])
    return scores


VALUES = st.lists(st.integers(1, 50), min_size=1, max_size=4, unique=True).map(
    lambda values: tuple(sorted(values))
)


@given(VALUES, VALUES, VALUES, st.tuples(*[st.integers(2, 50)] * 3), st.randoms())
def test_no_change_of_one_value_improves_on_the_end(
    batches: tuple[int, ...], windows: tuple[int, ...], counts: tuple[int, ...],
    current: tuple[int, int, int], chance: Random,
) -> None:  # fmt: skip
    """Whatever the figures, and if the values given leave out the current ones."""
    axes = {BATCH: batches, WINDOW: (0, *windows), INSTANCES: counts}
    # No two alike, the current setting the worst.
    worth = (chance.random() + 1e-9 * number for number in count())
    scores = walk(axes, current, lambda setting: next(worth) - (setting == current))
    own = {s for s in scores if all(v in a for v, a in zip(s, axes.values(), strict=True))}
    best = max(own, key=lambda setting: scores[setting])
    for number, values in enumerate(axes.values()):
        for value in values:
            changed = (*best[:number], value, *best[number + 1 :])
            assert (1, 0, changed[2]) in scores if changed[0] == 1 else changed in scores


def test_what_lies_near_comes_first() -> None:
    """What a lack of time cuts off lies far from the best so far."""
    axes = {"a": (1, 2, 4, 8, 16)}
    assert list(walk(axes, (4,), lambda setting: 0.0)) == [(4,), (2,), (1,), (8,), (16,)]


def test_single_requests_wait_for_nobody() -> None:
    axes = {BATCH: (1,), WINDOW: (0, 500), INSTANCES: (1, 2)}
    assert set(walk(axes, (1, 0, 1), sum)) == {(1, 0, 1), (1, 0, 2)}


def test_no_more_sequences_are_tried_than_a_step_has_tokens() -> None:
    axes = {SEQUENCES: (4, 64, 256), TOKENS: (128, 512)}
    tried = set(walk(axes, (256, 512), lambda setting: -setting[1]))
    assert (128, 128) in tried
    assert all(sequences <= tokens for sequences, tokens in tried)
