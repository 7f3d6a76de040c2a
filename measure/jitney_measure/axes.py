"""What is tuned: the axes of a model, the values to try on each, and the order of a search.

A setting is one value of each axis. The search varies one axis at a time: all values of the first
with the others as they are, then, with the best of them, those of the next, until a round changes
nothing. So it takes about the sum of the axes' lengths instead of their product. Pure data.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from jitney.errors import InvalidArgumentError

from jitney_measure.slo import read_time

Setting = tuple[int, ...]
"""A value for each axis, in their order."""
Score = tuple[float, ...]
"""Compared as tuples are; more is better."""

BATCH = "batch_size"
WINDOW = "window_us"
INSTANCES = "instances"
SEQUENCES = "max_num_seqs"
TOKENS = "max_num_batched_tokens"
OPTIONS = {
    False: {BATCH: "batch_sizes", WINDOW: "windows", INSTANCES: "instances"},
    True: {SEQUENCES: "max_num_seqs", TOKENS: "token_budgets"},
}
"""Axis -> its option, by whether it is a language model."""

_WINDOWS_US = (0, 500, 2000, 5000)
_LONGEST_WINDOW_US = 10_000_000
_MOST_INSTANCES = 64
_MOST_SEQUENCES = 65536
_MOST_TOKENS = 1 << 24
_TOKENS = {False: (128, 256, 512, 1024, 2048), True: (2048, 4096, 8192, 16384)}
"""Usual token budgets, by whether the model runs on a GPU."""

Axes = Mapping[str, tuple[int, ...]]
"""Axis -> the values to try, which ascend."""


def scheduler_axes(
    current: Setting, given: Mapping[str, Any], max_batch: int, tightest_s: float | None,
    cores: int, *, counts: bool,
) -> Axes:  # fmt: skip
    """Batch size, window and instances. ``tightest_s``: the least bound on latency; windows of half
    of it or more are not tried. ``counts``: whether the number of instances can be changed."""
    batch, window, instances = current
    limit_us = float("inf") if tightest_s is None else tightest_s * 1e6 / 2
    batches = [*_powers(4, max_batch), max_batch, batch]
    windows = [0, *(each for each in _WINDOWS_US if each < limit_us), window]
    numbers = [*_powers(2, min(max(2, cores), 4)), instances] if counts else [instances]
    return {
        BATCH: _values(BATCH, given, batches, max_batch, ", max_batch_size"),
        WINDOW: _values(WINDOW, given, windows, _LONGEST_WINDOW_US),
        INSTANCES: _values(INSTANCES, given, numbers, _MOST_INSTANCES),
    }


def engine_axes(
    current: Setting, given: Mapping[str, Any], highest_load: float | None, *, gpu: bool
) -> Axes:
    """max_num_seqs, up to the first power of four that no load exceeds, and the token budget.
    ``highest_load``: of requests in flight. None: loads are rates, and that number is unknown."""
    sequences, tokens = current
    enough = 256 if highest_load is None else max(4, highest_load)
    counts = [each for each in _powers(4, _MOST_SEQUENCES)[1:] if each < 4 * enough]
    return {
        SEQUENCES: _values(SEQUENCES, given, [*counts, sequences], _MOST_SEQUENCES),
        TOKENS: _values(TOKENS, given, [*_TOKENS[gpu], tokens], _MOST_TOKENS),
    }


def _values(
    axis: str, given: Mapping[str, Any], defaults: Iterable[int], most: int, of: str = ""
) -> tuple[int, ...]:
    """Those of the axis' option, else the defaults. ``of`` says where ``most`` is from."""
    option = (OPTIONS[True] | OPTIONS[False])[axis]
    if not (text := given[option]):
        return tuple(sorted(set(defaults)))
    parts = {part.strip() for part in text.split(",")}
    least = 1
    bound = f"whole numbers from 1 to {most}{of}, with commas between"
    if axis == WINDOW:
        least = 0
        bound = "times from 0 to 10s like 500us or 2ms, with commas between"
        times = [0.0 if part == "0" else read_time(part) for part in parts]
        values = [-1 if seconds is None else round(seconds * 1e6) for seconds in times]
    else:
        values = [int(part) if part.isdecimal() else 0 for part in parts]
    if min(values) < least or max(values) > most:
        raise InvalidArgumentError.of(option, text, bound)
    return tuple(sorted(set(values)))


def _powers(base: int, most: int) -> list[int]:
    return [base**i for i in range(most.bit_length()) if base**i <= most]


def search(axes: Axes, current: Setting, scores: Mapping[Setting, Score]) -> Iterator[Setting]:
    """The settings to try, each once, beginning at the values nearest to the current ones.

    The caller puts the score of each setting into ``scores`` before it takes the next one.
    """
    lines = list(axes.values())
    near = (min(a, key=lambda v: abs(v - now)) for a, now in zip(lines, current, strict=True))
    here = _canonical(axes, tuple(near))
    if here not in scores:
        yield here
    moved = True
    while moved:
        moved = False
        for i, values in enumerate(lines):
            # All values of this axis, with the others as they are. The nearest come first: so what
            # a lack of time leaves out is far away.
            steps = sorted((abs(value - here[i]), value) for value in values)
            line = [_canonical(axes, (*here[:i], value, *here[i + 1 :])) for _, value in steps]
            yield from (each for each in dict.fromkeys(line) if each not in scores)
            best = max([here, *line], key=lambda setting: scores[setting])  # the first of equals
            if scores[best] > scores[here]:
                here = best
                moved = True


def _canonical(axes: Axes, setting: Setting) -> Setting:
    """One of all settings that mean the same. Without batching there is no window. A step runs no
    more sequences than it has tokens, so of both numbers the smaller one is that of sequences."""
    if SEQUENCES in axes:
        return (min(setting), setting[1])
    return (1, 0, *setting[2:]) if BATCH in axes and setting[0] == 1 else setting


def label(values: Mapping[str, int]) -> str:
    """A setting as it is shown."""
    units = {BATCH: "batch {}", WINDOW: "window {}us", INSTANCES: "instances {}"}
    return ", ".join(units.get(name, f"{name} {{}}").format(v) for name, v in values.items())
