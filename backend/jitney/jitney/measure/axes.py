"""What is tuned: the axes of a model, the values to try on each, and the order of a search.

A setting is one value of each axis. The search varies one axis at a time: all values of the first
with the others as they are, then, with the best of them, those of the next, until a round changes
nothing. So it takes about the sum of the axes' lengths instead of their product. Pure data.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from jitney.errors import InvalidArgumentError
from jitney.measure.slo import read_time

Setting = tuple[int, ...]
"""A value for each axis, in their order."""
Score = tuple[float, ...]
"""Compared as tuples are; more is better."""

BATCH, WINDOW, INSTANCES = "batch_size", "window_us", "instances"
SEQUENCES, TOKENS = "max_num_seqs", "max_num_batched_tokens"
OPTIONS = {
    False: {BATCH: "batch_sizes", WINDOW: "windows", INSTANCES: "instances"},
    True: {SEQUENCES: "max_num_seqs", TOKENS: "token_budgets"},
}
"""Axis -> its option, by whether it is a language model."""

_WINDOWS_US, _LONGEST_WINDOW_US = (0, 500, 2000, 5000), 10_000_000
_MOST_INSTANCES, _MOST_SEQUENCES, _MOST_TOKENS = 64, 65536, 1 << 24
_TOKENS = {False: (128, 256, 512, 1024, 2048), True: (2048, 4096, 8192, 16384)}
"""Usual token budgets, by whether the model runs on a GPU."""


@dataclass(frozen=True)
class Axis:
    """One thing that is tuned. ``values`` ascend; ``fixed``: no others are tried."""

    name: str
    values: tuple[int, ...]
    fixed: bool = False


def scheduler_axes(
    current: Setting, given: Mapping[str, Any], max_batch: int, tightest_s: float | None,
    cores: int, *, counts: bool,
) -> tuple[Axis, ...]:  # fmt: skip
    """Batch size, window and instances. ``tightest_s``: the least bound on latency; windows of half
    of it or more are not tried. ``counts``: whether the number of instances can be changed."""
    batch, window, instances = current
    limit_us = float("inf") if tightest_s is None else tightest_s * 1e6 / 2
    batches = [*_powers(4, max_batch), max_batch, batch]
    windows = [0, *(each for each in _WINDOWS_US if each < limit_us), window]
    most = min(max(2, cores), 4)
    return (
        _axis(BATCH, given["batch_sizes"], batches, max_batch, ", max_batch_size"),
        _axis(WINDOW, given["windows"], windows, _LONGEST_WINDOW_US),
        _axis(INSTANCES, given["instances"], [*_powers(2, most), instances], _MOST_INSTANCES)
        if counts
        else Axis(INSTANCES, (instances,), fixed=True),
    )


def engine_axes(
    current: Setting, given: Mapping[str, Any], greatest_load: float | None, *, gpu: bool
) -> tuple[Axis, ...]:
    """max_num_seqs, up to the first power of four that no load exceeds, and the token budget.
    ``greatest_load`` None: loads by rate, whose number at once is unknown."""
    sequences, tokens = current
    enough = 256 if greatest_load is None else max(4, greatest_load)
    counts = [each for each in _powers(4, _MOST_SEQUENCES)[1:] if each < 4 * enough]
    return (
        _axis(SEQUENCES, given["max_num_seqs"], [*counts, sequences], _MOST_SEQUENCES),
        _axis(TOKENS, given["token_budgets"], [*_TOKENS[gpu], tokens], _MOST_TOKENS),
    )


def _axis(name: str, text: str, defaults: Iterable[int], most: int, of: str = "") -> Axis:
    """Values of the option's text, else the defaults. ``of`` says where ``most`` is from."""
    if not text:
        return Axis(name, tuple(sorted(set(defaults))))
    option = (OPTIONS[True] | OPTIONS[False])[name]
    if name == WINDOW:
        least, bound = 0, "times from 0 to 10s like 500us or 2ms, with commas between"
    else:
        least, bound = 1, f"whole numbers from 1 to {most}{of}, with commas between"
    values = {_value(name, part.strip()) for part in text.split(",")}
    if min(values) < least or max(values) > most:
        raise InvalidArgumentError.of(option, text, bound)
    return Axis(name, tuple(sorted(values)), fixed=True)


def _value(name: str, text: str) -> int:
    """-1 if it cannot be read."""
    if name == WINDOW and text != "0":
        seconds = read_time(text)
        return -1 if seconds is None else round(seconds * 1e6)
    return int(text) if text.isdecimal() else -1


def _powers(base: int, most: int) -> list[int]:
    made = [1]
    while made[-1] * base <= most:
        made.append(made[-1] * base)
    return made


def search(
    axes: Sequence[Axis], current: Setting, scores: Mapping[Setting, Score]
) -> Iterator[Setting]:
    """The settings to try, each once; at the end those halfway between the best and its neighbours.

    The caller puts the score of each setting into ``scores`` before it takes the next one.
    """
    near = (min(a.values, key=lambda v: abs(v - now)) for a, now in zip(axes, current, strict=True))
    yield from _along(axes, _canonical(axes, tuple(near)), scores)
    best = max(scores, key=lambda setting: scores[setting])
    yield from _along([_halfway(*each) for each in zip(axes, best, strict=True)], best, scores)


def _along(
    axes: Sequence[Axis], here: Setting, scores: Mapping[Setting, Score]
) -> Iterator[Setting]:
    if here not in scores:
        yield here
    moved = True
    while moved:
        moved = False
        for i, axis in enumerate(axes):
            # What a lack of time leaves out is far away.
            steps = sorted((abs(value - here[i]), value) for value in axis.values)
            line = [_canonical(axes, (*here[:i], value, *here[i + 1 :])) for _, value in steps]
            yield from (each for each in dict.fromkeys(line) if each not in scores)
            best = max([here, *line], key=lambda setting: scores[setting])  # the first of equals
            if scores[best] > scores[here]:
                here, moved = best, True


def _canonical(axes: Sequence[Axis], setting: Setting) -> Setting:
    """One of all settings that mean the same: without batching there is no window."""
    return (1, 0, *setting[2:]) if axes[0].name == BATCH and setting[0] == 1 else setting


def _halfway(axis: Axis, best: int) -> Axis:
    """The best value and what lies halfway to its neighbours: by ratio, from 0 by difference."""
    if axis.fixed:
        return axis
    values = {best}
    for low, high in pairwise(axis.values):
        if best in (low, high):
            values.add(round((low * high) ** 0.5) if low else high // 2)
    return Axis(axis.name, tuple(sorted(values)))


def label(values: Mapping[str, int]) -> str:
    """A setting as it is shown."""
    units = {BATCH: "batch {}", WINDOW: "window {}us", INSTANCES: "instances {}"}
    return ", ".join(units.get(name, f"{name} {{}}").format(v) for name, v in values.items())
