"""Which load of a setting is measured next: up while it pays, down while the bounds are broken.

Pure. Loads are numbered as they ascend.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

GAIN = 0.02
"""A load pays if it meets the bounds and has so much more throughput than the best before it."""


@dataclass(frozen=True)
class Seen:
    """One load as it was measured."""

    meets: bool
    throughput: float


def next_load(count: int, start: int, seen: Mapping[int, Seen], patience: int) -> int | None:
    """The next of ``count`` loads; None when the ladder is climbed.

    From ``start`` upwards until ``patience`` loads in a row do not pay. If already the first breaks
    the bounds, and the patience does not reach beyond it, downwards until one meets them.
    """
    climb = _upwards(count, start, seen, patience)
    if climb is not None:
        return climb
    if any(each.meets for each in seen.values()):
        return None
    return min(seen) - 1 if seen and min(seen) > 0 else None


def _upwards(count: int, start: int, seen: Mapping[int, Seen], patience: int) -> int | None:
    best = 0.0
    idle = 0
    for number in range(start, count):
        if number not in seen:
            return number
        if seen[number].meets and seen[number].throughput > best * (1 + GAIN):
            best, idle = seen[number].throughput, 0
        else:
            idle += 1
        if idle == patience:
            return None
    return None


def refined(levels: Sequence[float], best: float, *, whole: bool) -> tuple[float, ...]:
    """The levels with what lies halfway (by ratio) between the best and its neighbours."""
    made = set(levels)
    for low, high in pairwise(levels):
        if best in (low, high):
            middle = (low * high) ** 0.5
            made.add(float(round(middle)) if whole else float(f"{middle:.3g}"))
    return tuple(sorted(made))
