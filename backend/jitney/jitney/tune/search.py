"""Which setting is tried next, from what was found so far. Pure, and the same for the same scores.

One axis at a time: all values of the first axis with the others as they are now, on with the best
of them to the next axis, and round again until a whole round changes nothing. What is left is a
setting that no change of one value improves. It takes about the sum of the axes' lengths instead of
their product.
"""

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Literal

from jitney.tune.setting import Setting, Space

Score = tuple[float, ...]
"""Compared as tuples are; more is better."""
Strategy = Literal["grid", "axes"]


def propose(
    space: Space, strategy: Strategy, start: Setting, scores: Mapping[Setting, Score]
) -> Setting | None:
    """The next setting without a score; None when there is no more to try.

    ``start`` is where the search sets out from. Settings that mean the same are tried once.
    """
    if start not in scores:
        return start
    if strategy == "grid":
        every = {space.canonical(setting) for setting in product(*_values(space))} - set(scores)
        return min(every, key=lambda s: (_changes(s, start), s), default=None)
    return _along_axes(space, start, scores)


def _along_axes(space: Space, start: Setting, scores: Mapping[Setting, Score]) -> Setting | None:
    """Where the user's values leave out those of ``start``, from the nearest setting of theirs."""
    near = (
        _nearest_first(axis, value)[0] for axis, value in zip(_values(space), start, strict=True)
    )
    here = space.canonical(tuple(near))
    if here not in scores:
        return here
    moved = True
    while moved:
        moved = False
        for number, values in enumerate(_values(space)):
            line = [
                _with(space, here, number, value) for value in _nearest_first(values, here[number])
            ]
            for setting in line:
                if setting not in scores:
                    return setting
            best = max([here, *line], key=lambda setting: scores[setting])  # the first of equals
            if scores[best] > scores[here]:
                here, moved = best, True
    return None


def _values(space: Space) -> list[Sequence[int]]:
    return [axis.values for axis in space.axes]


def _with(space: Space, setting: Setting, axis: int, value: int) -> Setting:
    return space.canonical((*setting[:axis], value, *setting[axis + 1 :]))


def _nearest_first(values: Sequence[int], value: int) -> list[int]:
    """By steps along the axis, so that what a lack of time leaves out is what lies far off."""
    ordered = sorted({*values, value})
    place = ordered.index(value)
    return sorted(values, key=lambda each: abs(ordered.index(each) - place))


def _changes(setting: Setting, start: Setting) -> int:
    return sum(a != b for a, b in zip(setting, start, strict=True))
