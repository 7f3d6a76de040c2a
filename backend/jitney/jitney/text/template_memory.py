"""Bounds the memory that a chat template fills: texts that double in a loop would take all of it.

``chat_template`` makes a :class:`MemoryBudget` for each chat that it renders, and shows it each
value that the template makes. ``template_growth`` refuses the single operations whose result would
be too large, before they begin.
"""

import sys
from collections.abc import Collection, ItemsView, Iterable, KeysView, ValuesView
from typing import Any, NamedTuple

from jinja2.utils import Cycler

from jitney.errors import InvalidArgumentError
from jitney.text.template_budget import CpuBudget

MOST_VALUE_BYTES = 128 << 20
"""Of one value, with all that is in it: as many times as it is in it, for so often is it written or
compared."""
_MOST_TEXT_BYTES = 32 << 20
"""Of a value that is no text and becomes one, which may be four times as large."""
_MOST_BYTES = 256 << 20
"""Of all values that a template holds at a time."""
_SWEEP_BYTES = 64 << 20
"""So much is made between two looks at what the template still holds."""
_LEAST_NOTED_BYTES = 1024
"""Smaller texts count only as parts of what they are in."""
_SCALARS = frozenset((bool, int, float, type(None)))
_SMALL_CHARACTERS = (_LEAST_NOTED_BYTES - 100) // 4
"""A text of fewer is smaller than that."""
_BYTES_OF_STEP = 1024
"""To make so many bytes takes as long as a step of a template, or less."""
_PARTS_OF_STEP = 8
"""To weigh so many parts takes as long."""
_REFERENCES = 3
"""What counts for getrefcount() is: the record, a local variable, and its own argument."""


class _Held(NamedTuple):
    value: Any
    own_bytes: int
    """Without the parts that are held themselves."""
    all_bytes: int
    """With each part, as many times as it is in the value."""


class MemoryBudget:
    """The memory that the rendering of one chat may still fill.

    It holds each value that it is shown, so that no other gets its id(). Now and then it lets go of
    those to which only it refers.
    """

    def __init__(self, cpu: CpuBudget, most_bytes: int = _MOST_BYTES) -> None:
        """``cpu`` is looked at while large values are weighed. ``most_bytes``: of all values that
        the template holds at a time; no single one may be larger."""
        self._cpu = cpu
        self._most_bytes = most_bytes
        self._held: dict[int, _Held] = {}  # by id(), in order: parts come before what they are in
        self._num_bytes = 0  # the sum of own_bytes
        self._sweep_at = min(_SWEEP_BYTES, most_bytes)

    def note(self, value: Any) -> None:
        """Note a value that the template made. Raises InvalidArgumentError if it is too large, or
        if the template holds too much."""
        self._check(self._weigh(value), MOST_VALUE_BYTES)

    def note_text_of(self, value: Any) -> None:
        """Note a value that becomes a text. Raises as :meth:`note`."""
        if not isinstance(value, (str, int, float)):
            self._check(self._weigh(value), _MOST_TEXT_BYTES)

    def size(self, values: Iterable[Any]) -> int:
        """The bytes of several values, with all that is in them. Raises as :meth:`note`."""
        return sum(map(self._weigh, values))

    def _check(self, num_bytes: int, most: int) -> None:
        most = min(most, self._most_bytes)
        if num_bytes > most:
            raise too_large(most)

    def _weigh(self, value: Any) -> int:
        """The bytes of a value, with each part as many times as it is in it."""
        held = self._held.get(id(value))
        if held is not None:
            return held.all_bytes
        own_bytes = sys.getsizeof(value, 64)
        parts = _parts_of(value)
        if parts is None:
            if own_bytes >= _LEAST_NOTED_BYTES:
                self._hold(value, own_bytes, own_bytes)
            return own_bytes
        self._cpu.count(len(parts) // _PARTS_OF_STEP)
        all_bytes = own_bytes
        for part in parts:
            if is_small(part):  # most are
                part_bytes = sys.getsizeof(part)
                own_bytes += part_bytes
            else:
                part_bytes = self._weigh(part)
                if id(part) not in self._held:
                    own_bytes += part_bytes
            all_bytes += part_bytes
        self._hold(value, own_bytes, all_bytes)
        return all_bytes

    def _hold(self, value: Any, own_bytes: int, all_bytes: int) -> None:
        self._held[id(value)] = _Held(value, own_bytes, all_bytes)
        self._num_bytes += own_bytes
        self._cpu.count(own_bytes // _BYTES_OF_STEP)
        if self._num_bytes > self._sweep_at:
            self._sweep()

    def _sweep(self) -> None:
        """Let go of what the template has dropped. Raises InvalidArgumentError if what it still
        holds is too much."""
        for key in reversed(list(self._held)):
            value = self._held[key].value
            if sys.getrefcount(value) <= _REFERENCES:
                self._num_bytes -= self._held.pop(key).own_bytes
        if self._num_bytes > self._most_bytes:
            raise InvalidArgumentError(
                "messages: the model's chat template holds more than "
                f"{self._most_bytes >> 20} MiB of values to render them"
            )
        self._sweep_at = self._num_bytes + _SWEEP_BYTES


def is_small(value: Any) -> bool:
    """Whether a value need not be noted. Most need not: this is quick."""
    if type(value) is str:
        return len(value) < _SMALL_CHARACTERS
    return type(value) in _SCALARS


def too_large(most_bytes: int) -> InvalidArgumentError:
    """The refusal of a value with more than so many bytes."""
    return InvalidArgumentError(
        "messages: the model's chat template makes a value of more than "
        f"{most_bytes >> 20} MiB to render them"
    )


def _parts_of(value: Any) -> Collection[Any] | None:
    """What is in a value; None if that is nothing."""
    if type(value) is str:
        return None
    if isinstance(value, dict):
        return [*value.keys(), *value.values()]
    if isinstance(value, (list, tuple)):
        return value
    if isinstance(value, (KeysView, ValuesView, ItemsView)):
        return list(value)
    if isinstance(value, Cycler):
        items: tuple[Any, ...] = value.items
        return items
    return None
