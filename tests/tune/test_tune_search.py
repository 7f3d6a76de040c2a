"""Which setting is tried next: nothing twice, nothing foreign, and where the search rests."""

from collections.abc import Callable, Mapping
from itertools import product
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jitney.tune.search import Score, Strategy, propose
from jitney.tune.setting import BATCH, INSTANCES, WINDOW, Axis, Setting, Space

VALUES = st.lists(st.integers(1, 50), min_size=1, max_size=4, unique=True).map(
    lambda values: tuple(sorted(values))
)


@st.composite
def spaces(draw: st.DrawFn) -> Space:
    axes = (
        Axis(BATCH, draw(VALUES)),
        Axis(WINDOW, (0, *draw(VALUES))),
        Axis(INSTANCES, draw(VALUES)),
    )
    current = draw(st.tuples(*(st.sampled_from([*axis.values, 7]) for axis in axes)))
    made = Space(axes, current)
    return Space(axes, made.canonical(current))


def walk(
    space: Space, strategy: Strategy, worth: Callable[[Setting], float]
) -> dict[Setting, Score]:
    """All that a search tries, in its order."""
    scores: dict[Setting, Score] = {}
    most = space.size()
    while (setting := propose(space, strategy, space.current, scores)) is not None:
        assert setting not in scores, "tried twice"
        scores[setting] = (worth(setting),)
        assert len(scores) <= most, "tried what is not there"
    return scores


def inside(space: Space) -> set[Setting]:
    """All settings of the axes' own values."""
    return {space.canonical(setting) for setting in product(*(a.values for a in space.axes))}


@settings(deadline=None)
@given(spaces(), st.randoms(use_true_random=False))
def test_one_axis_at_a_time_comes_to_rest(space: Space, chance: Random) -> None:
    """Whatever the figures, no change of one value improves on what it ends at."""
    worth: dict[Setting, float] = {}

    def any_worth(setting: Setting) -> float:  # no two alike
        return worth.setdefault(setting, chance.random() + 1e-9 * len(worth))

    scores = walk(space, "axes", any_worth)
    assert next(iter(scores)) == space.current
    for setting in scores.keys() - {space.current}:
        assert setting == space.canonical(setting)
        for value, axis in zip(setting, space.axes, strict=True):
            assert value in axis.values, "the current setting's values are for itself alone"
    best = max(inside(space), key=lambda setting: scores.get(setting, (-1.0,)))
    for number, axis in enumerate(space.axes):
        for value in axis.values:
            changed = space.canonical((*best[:number], value, *best[number + 1 :]))
            assert changed in scores, "a neighbour of the best was left out"


@settings(deadline=None)
@given(spaces())
def test_where_axes_do_not_depend_on_each_other_it_finds_the_best(space: Space) -> None:
    def worth(setting: Setting) -> float:
        batch, window, instances = setting
        return -abs(batch - 20) - 1e-3 * abs(instances - 9) - 1e-6 * window

    found = max(map(worth, walk(space, "axes", worth)))
    assert found == max(map(worth, inside(space) | {space.current}))


@settings(deadline=None)
@given(spaces())
def test_the_grid_is_all_of_it(space: Space) -> None:
    scores = walk(space, "grid", sum)
    assert set(scores) == inside(space) | {space.current}
    assert len(scores) == space.size()


def test_one_axis_at_a_time_takes_the_sum_not_the_product() -> None:
    axes = (Axis("a", tuple(range(1, 11))), Axis("b", tuple(range(1, 11))), Axis("c", (1, 2, 3)))
    space = Space(axes, (1, 1, 1))
    tried = walk(space, "axes", lambda setting: -abs(setting[0] - 8) - abs(setting[1] - 3))
    assert len(tried) < 45 < space.size() == 300
    assert max(tried, key=lambda setting: tried[setting])[:2] == (8, 3)


def test_what_lies_near_comes_first() -> None:
    """What a lack of time cuts off lies far from the best so far."""
    space = Space((Axis("a", (1, 2, 4, 8, 16)),), (4,))
    assert list(walk(space, "axes", lambda setting: 0.0)) == [(4,), (2,), (8,), (1,), (16,)]


@pytest.mark.parametrize("strategy", ["axes", "grid"])
def test_single_requests_wait_for_nobody(strategy: Strategy) -> None:
    space = Space((Axis(BATCH, (1,)), Axis(WINDOW, (0, 500)), Axis(INSTANCES, (1, 2))), (1, 0, 1))
    assert set(walk(space, strategy, sum)) == {(1, 0, 1), (1, 0, 2)}
    assert space.size() == 2


def test_a_setting_that_failed_is_left_behind() -> None:
    """The search goes on from the best that loaded; also if the current one did not."""
    space = Space((Axis("a", (1, 2, 3)), Axis("b", (1, 2))), (1, 1))
    scores: Mapping[Setting, Score] = {(1, 1): (0.0, 0.0), (2, 1): (2.0, 5.0), (3, 1): (0.0, 0.0)}
    assert propose(space, "axes", (1, 1), scores) == (2, 2)
