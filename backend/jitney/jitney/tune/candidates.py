"""The values that are tried on each axis: those of the options, or a few around the current one.

Pure. What the user gives is taken as it is and checked; defaults stay within what can matter: no
batch above ``max_batch_size``, no window as long as half of the bound on latency, no number of
sequences far beyond the greatest load.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise

from jitney.errors import InvalidArgumentError

_WINDOW = re.compile(r"(\d+(?:\.\d+)?)(us|ms|s)?")
_WINDOW_UNITS = {"us": 1, "ms": 1000, "s": 1_000_000, None: 1}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)(s|m|h)")
_DURATION_UNITS = {"s": 1, "m": 60, "h": 3600}
_LONGEST_WINDOW_US = 10_000_000
_WINDOWS_US = (0, 500, 2000, 5000)
_MOST_DEFAULT_INSTANCES = 4
_CPU_TOKENS = (128, 256, 512, 1024, 2048)
_GPU_TOKENS = (2048, 4096, 8192, 16384)


def whole(field: str, text: str, low: int, high: int, of: str = "") -> tuple[int, ...]:
    """``1,4,16``, ascending. ``of`` says where ``high`` comes from. Raises InvalidArgumentError."""
    bound = f"whole numbers from {low} to {high}{of}, with commas between"

    def read(part: str) -> int | None:
        return int(part) if part.isdecimal() and low <= int(part) <= high else None

    return _read(field, text, read, bound)


def windows(field: str, text: str) -> tuple[int, ...]:
    """``0,500us,2ms`` in microseconds, ascending. Raises InvalidArgumentError."""

    def read(part: str) -> int | None:
        match = _WINDOW.fullmatch(part)
        if match is None or (match[2] is None and float(match[1]) != 0):
            return None
        microseconds = round(float(match[1]) * _WINDOW_UNITS[match[2]])
        return microseconds if microseconds <= _LONGEST_WINDOW_US else None

    return _read(field, text, read, "times from 0 to 10s like 500us or 2ms, with commas between")


def duration(field: str, text: str) -> float:
    """``90s``, ``10m`` or ``1h`` in seconds. Raises InvalidArgumentError."""
    match = _DURATION.fullmatch(text.strip())
    seconds = float(match[1]) * _DURATION_UNITS[match[2]] if match is not None else 0.0
    if not 0 < seconds <= 7 * 86400:
        raise InvalidArgumentError.of(field, text, "a time above 0 like 90s, 10m or 1h")
    return seconds


def _read(field: str, text: str, read: Callable[[str], int | None], bound: str) -> tuple[int, ...]:
    values = [read(part.strip()) for part in text.split(",")]
    found = {value for value in values if value is not None}
    if None in values or not found:
        raise InvalidArgumentError.of(field, text, bound)
    return tuple(sorted(found))


def batch_sizes(current: int, most: int) -> tuple[int, ...]:
    """Powers of four up to ``most``, itself and the current one."""
    return _ascending([*_powers(4, most), most, current])


def default_windows(current_us: int, tightest_s: float | None) -> tuple[int, ...]:
    """None, a few short ones and the current one. ``tightest_s``: the least bound on latency."""
    limit = float("inf") if tightest_s is None else tightest_s * 1e6 / 2
    return _ascending([*(window for window in _WINDOWS_US if window < limit), 0, current_us])


def instance_counts(current: int, cores: int) -> tuple[int, ...]:
    """Powers of two up to the cores, at least 1 and 2, and the current one."""
    most = min(max(2, cores), _MOST_DEFAULT_INSTANCES)
    return _ascending([*_powers(2, most), current])


def sequence_counts(current: int, greatest_load: float | None) -> tuple[int, ...]:
    """Powers of four up to the first that no load exceeds, and the current one.

    More sequences than there are ever requests change nothing. None: loads by rate, of which
    nobody knows how many meet.
    """
    enough = 256 if greatest_load is None else min(max(4, greatest_load), 65536)
    most = 4
    while most < enough:
        most *= 4
    return _ascending([*_powers(4, min(most, 65536))[1:], current])


def token_budgets(current: int, *, gpu: bool) -> tuple[int, ...]:
    """Around what is usual on the device, and the current one."""
    return _ascending([*(_GPU_TOKENS if gpu else _CPU_TOKENS), current])


def midpoints(values: Sequence[int], best: int) -> tuple[int, ...]:
    """``best`` and what lies halfway to its neighbours: by ratio, from 0 by difference."""
    ordered = sorted(set(values) | {best})
    place = ordered.index(best)
    halves = [_halfway(low, high) for low, high in pairwise(ordered) if best in (low, high)]
    return _ascending([ordered[place], *halves])


def _halfway(low: int, high: int) -> int:
    return (low + high) // 2 if low == 0 else round((low * high) ** 0.5)


def _powers(base: int, most: int) -> list[int]:
    made = [1]
    while made[-1] * base <= most:
        made.append(made[-1] * base)
    return made


def _ascending(values: Iterable[int]) -> tuple[int, ...]:
    return tuple(sorted(set(values)))
