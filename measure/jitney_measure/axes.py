"""What is tuned: the axes of a model, the values to try on each, and the order of a search.

A setting is one value of each axis. The search varies one axis at a time: all values of the first
with the others as they are, then, with the best of them, those of the next, until a round changes
nothing. So it takes about the sum of the axes' lengths instead of their product.

Nothing here reads a file or talks to a server.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from jitney.errors import InvalidArgumentError

from jitney_measure.slo import read_time

Setting = tuple[int, ...]
"""A value for each axis, in their order."""


# The levels of a score.
WITHIN_BOUNDS = 2
"""Some load is within the bounds."""
OVER_BOUNDS = 1
"""No load is, but some load has an excess over them."""
NO_FIGURES = 0
"""No load has either."""


class Score(NamedTuple):
    """How good a setting is. A higher level is better, and within a level a higher value."""

    level: int
    value: float
    """At WITHIN_BOUNDS the throughput. At OVER_BOUNDS the excess, negated. At NO_FIGURES how many
    loads were tried."""


BATCH = "batch_size"
WINDOW = "window_us"
INSTANCES = "instances"
SEQUENCES = "max_num_seqs"
TOKENS = "max_num_batched_tokens"

_WINDOWS_US = (0, 500, 2000, 5000)
_MAX_WINDOW_US = 10_000_000
_MAX_INSTANCES = 64
_MAX_SEQUENCES = 65536
_MAX_TOKENS = 1 << 24
_TOKENS_ON_CPU = (128, 256, 512, 1024, 2048)
_TOKENS_ON_GPU = (2048, 4096, 8192, 16384)

Axes = Mapping[str, tuple[int, ...]]
"""Axis -> the values to try, which ascend."""


@dataclass(frozen=True)
class AxisOptions:
    """The values to try as the user gave them, by the names of the options; empty: the defaults.
    The first three are of models with the server's batcher, the others of language models."""

    batch_sizes: str = ""
    windows: str = ""
    instances: str = ""
    max_num_seqs: str = ""
    token_budgets: str = ""


def scheduler_axes(
    current: Setting,
    given: AxisOptions,
    *,
    max_batch: int,
    tightest_s: float | None,
    cores: int,
    can_change_instances: bool,
) -> Axes:
    """Batch size, window and instances. ``tightest_s``: the least bound on latency; windows of half
    of it or more are not tried."""
    batch, window, instances = current
    batches = [*_powers(4, max_batch), max_batch, batch]
    windows = [0, window]
    for each in _WINDOWS_US:
        if tightest_s is None or each < tightest_s * 1e6 / 2:
            windows.append(each)
    numbers = [instances]
    if can_change_instances:
        # No more than there are cores, but 2 are tried in any case.
        most = 4 if cores >= 4 else 2
        numbers += _powers(2, most)
    if given.batch_sizes:
        expected = f"from 1 to {max_batch}, max_batch_size"
        batches = _integers("batch_sizes", given.batch_sizes, max_batch, expected)
    if given.windows:
        windows = _windows(given.windows)
    if given.instances:
        expected = f"from 1 to {_MAX_INSTANCES}"
        numbers = _integers("instances", given.instances, _MAX_INSTANCES, expected)
    return {
        BATCH: _ascending(batches),
        WINDOW: _ascending(windows),
        INSTANCES: _ascending(numbers),
    }


def engine_axes(
    current: Setting, given: AxisOptions, highest_load: float | None, *, gpu: bool
) -> Axes:
    """max_num_seqs and the token budget. ``highest_load``: of requests in flight. None: loads are
    rates, and that number is unknown.

    max_num_seqs ends at the first power of four that no load exceeds: 4, 16, 64 for a load of 40.
    """
    sequences, tokens = current
    enough = 256 if highest_load is None else max(4, highest_load)
    # The largest power below 4 * enough is the first that is at least ``enough``. For 40 it is 64,
    # because 64 < 160 <= 256.
    numbers = [each for each in _powers(4, _MAX_SEQUENCES) if 4 <= each < 4 * enough]
    numbers.append(sequences)
    budgets = [*(_TOKENS_ON_GPU if gpu else _TOKENS_ON_CPU), tokens]
    if given.max_num_seqs:
        expected = f"from 1 to {_MAX_SEQUENCES}"
        numbers = _integers("max_num_seqs", given.max_num_seqs, _MAX_SEQUENCES, expected)
    if given.token_budgets:
        expected = f"from 1 to {_MAX_TOKENS}"
        budgets = _integers("token_budgets", given.token_budgets, _MAX_TOKENS, expected)
    return {SEQUENCES: _ascending(numbers), TOKENS: _ascending(budgets)}


def _ascending(values: Iterable[int]) -> tuple[int, ...]:
    return tuple(sorted(set(values)))


def _integers(option: str, text: str, most: int, expected: str) -> list[int]:
    values = []
    for part in text.split(","):
        digits = part.strip()
        if not digits.isdecimal() or not 1 <= int(digits) <= most:
            raise InvalidArgumentError.of(
                option, text, f"whole numbers {expected}, with commas between"
            )
        values.append(int(digits))
    return values


def _windows(text: str) -> list[int]:
    values = []
    for part in text.split(","):
        time = part.strip()
        seconds = 0.0 if time == "0" else read_time(time)
        if seconds is None or round(seconds * 1e6) > _MAX_WINDOW_US:
            expected = "times from 0 to 10s like 500us or 2ms, with commas between"
            raise InvalidArgumentError.of("windows", text, expected)
        values.append(round(seconds * 1e6))
    return values


def _powers(base: int, most: int) -> list[int]:
    """The powers of ``base`` from 1 to ``most``."""
    powers = []
    power = 1
    while power <= most:
        powers.append(power)
        power *= base
    return powers


class Search:
    """Says which settings to try, each once, beginning at the values nearest to the current ones.

    Call :meth:`next` for a setting, :meth:`report` how good it was, and so on.
    """

    def __init__(self, axes: Axes, current: Setting, score: Score) -> None:
        """``score``: that of the current setting."""
        self._axes = axes
        self._scores = {current: score}
        nearest = []
        for values, value in zip(axes.values(), current, strict=True):
            nearest.append(_by_distance(values, value)[0])
        self._best = _canonical(axes, tuple(nearest))
        self._axis = 0
        """The axis that is varied now."""
        self._axes_without_gain = 0
        """How many axes were varied one after the other since the best setting changed."""

    def next(self) -> Setting | None:
        """The setting to try next; None at the end."""
        if self._best not in self._scores:
            # Only at first: the current setting is not on the axes, or not canonical. The search
            # then begins at the nearest setting that is both.
            return self._best
        while self._axes_without_gain < len(self._axes):
            settings = self._settings_on_axis()
            for setting in settings:
                if setting not in self._scores:
                    return setting
            self._go_to_next_axis(settings)
        return None

    def report(self, setting: Setting, score: Score) -> None:
        """How good the setting was."""
        self._scores[setting] = score

    def _settings_on_axis(self) -> list[Setting]:
        """All values of this axis, with the others as they are. The nearest come first: so what a
        lack of time leaves out is far away."""
        values = list(self._axes.values())[self._axis]
        settings = []
        for value in _by_distance(values, self._best[self._axis]):
            changed = list(self._best)
            changed[self._axis] = value
            settings.append(_canonical(self._axes, tuple(changed)))
        return settings

    def _go_to_next_axis(self, settings: Sequence[Setting]) -> None:
        """``settings``: those of this axis, which all have scores."""
        self._axes_without_gain += 1
        for setting in settings:
            if self._scores[setting] > self._scores[self._best]:
                self._best = setting
                self._axes_without_gain = 0
        self._axis = (self._axis + 1) % len(self._axes)


def _by_distance(values: Iterable[int], value: int) -> list[int]:
    """The nearest to ``value`` first; of two that are equally near, the smaller one."""
    return sorted(values, key=lambda each: (abs(each - value), each))


def _canonical(axes: Axes, setting: Setting) -> Setting:
    """Several settings may mean the same. Only one of them is tried: the one that this returns."""
    if SEQUENCES in axes:
        # A step runs no more sequences than it has tokens.
        sequences, tokens = setting
        return (min(sequences, tokens), tokens)
    if BATCH in axes:
        batch, _, instances = setting
        if batch == 1:  # nothing waits for a batch: the window means nothing
            return (1, 0, instances)
    return setting


def label(values: Mapping[str, int]) -> str:
    """A setting as it is shown."""
    short_names = {BATCH: "batch", WINDOW: "window"}
    parts = []
    for name, value in values.items():
        unit = "us" if name == WINDOW else ""
        parts.append(f"{short_names.get(name, name)} {value}{unit}")
    return ", ".join(parts)
