"""Refuses what would fill memory in one operation of a chat template, such as ``'x' * 10 ** 9``.

Nothing interrupts such an operation, so it must not begin. Called by ``chat_template``, before each
method, filter and operator that can make far more than it is given. What the others make is a few
times as large as what they are given, which ``template_memory`` bounds.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jitney.errors import InvalidArgumentError
from jitney.text.template_memory import MOST_VALUE_BYTES, MemoryBudget, too_large

_LARGEST_INTEGER_BITS = 4096
"""Nothing interrupts ``9 ** (9 ** 9)`` either."""
_MOST_COUNT = 1_000_000
"""Of a width, or of the parts of a list."""
_PART_BYTES = 64
"""Of a short text in a list."""
_SPACES = [chr(code) for code in range(0x3001) if chr(code).isspace()]
_FIELD = re.compile(r"%(?:\([^)]*\))?[^a-zA-Z%]*|\{[^}]*\}?")
"""A field of a format, of ``%`` or of braces."""
_INSIDE_FIELD = re.compile(r".[^}]*[{*]")
"""A width that is an argument."""

_OF_LISTS = frozenset((
    "abs", "attr", "batch", "count", "d", "default", "dictsort", "first", "float", "groupby", "int",
    "items", "last", "length", "list", "map", "max", "min", "random", "reject", "rejectattr",
    "reverse", "round", "select", "selectattr", "slice", "sort", "sum", "unique",
))  # fmt: skip
"""Filters that make no text of their value. Any other may."""
_LIST_CHARACTERS = frozenset(("batch", "groupby", "list", "slice", "sort", "unique"))
"""Filters that may make a list of a text's characters."""
_WITH_COUNT = frozenset(("batch", "center", "indent", "round", "slice", "tojson"))
"""Filters with a number on which the size of the result depends, or the time that it takes."""


def check_power(base: object, exponent: object) -> None:
    """Raise InvalidArgumentError if ``base ** exponent`` is an integer of too many digits."""
    if isinstance(base, int) and isinstance(exponent, int):
        _check_bits("power", base.bit_length() * max(exponent, 0))


def check_product(budget: MemoryBudget, left: object, right: object) -> None:
    """Raise InvalidArgumentError if ``left * right`` is too large."""
    if isinstance(left, int) and isinstance(right, int):
        _check_bits("product", left.bit_length() + right.bit_length())
        return
    count = left if isinstance(left, int) else right
    repeated = right if isinstance(left, int) else left
    if isinstance(count, int):
        _check_bytes(budget.size([repeated]) * max(count, 0))


def check_format(budget: MemoryBudget, text: object, values: object) -> None:
    """Raise InvalidArgumentError if ``text % values`` is too large."""
    if isinstance(text, str):
        _check_bytes(_formatted(budget, text, [values]))


def check_method(
    budget: MemoryBudget, owner: object, name: str, values: Sequence[Any]
) -> Sequence[Any]:
    """Raise InvalidArgumentError if a method of a text or a number makes too much. Returns its
    arguments, among which an iterator is a list now."""
    if isinstance(owner, int):
        _check_counts(values)
    if isinstance(owner, bytes):
        owner = owner.decode("latin-1")
    if isinstance(owner, str) and name in _METHODS:
        values = [_listed(value) for value in values]
        _check_bytes(_METHODS[name](budget, owner, values))
    return values


def check_filter(
    budget: MemoryBudget, name: str, value: Any, args: Sequence[Any], options: Mapping[str, Any]
) -> Any:
    """Raise InvalidArgumentError if a filter makes too much of ``value``. Returns the value, which
    is a list now if it was an iterator that is joined."""
    values = [*args, *options.values()]
    if name in _WITH_COUNT:
        _check_counts(values)
    if name == "join":
        value = _listed(value)
    if name not in _OF_LISTS:
        budget.note_text_of(value)
    if isinstance(value, str) and name in _LIST_CHARACTERS:
        _check_bytes(len(value) * (8 if value.isascii() else 8 + _PART_BYTES))
    if name in _FILTERS:
        _check_bytes(_FILTERS[name](budget, value, values))
        if name == "replace" and options:  # these may be in any order
            _check_bytes(_FILTERS[name](budget, value, values[::-1]))
    return value


def _check_bits(what: str, num_bits: int) -> None:
    if num_bits > _LARGEST_INTEGER_BITS:
        raise InvalidArgumentError(
            f"messages: the model's chat template computes a {what} of {num_bits:,} bits, but "
            f"at most {_LARGEST_INTEGER_BITS:,} are computed"
        )


def _check_bytes(num_bytes: int) -> None:
    if num_bytes > MOST_VALUE_BYTES:
        raise too_large(MOST_VALUE_BYTES)


def _check_counts(values: Sequence[Any]) -> None:
    for value in values:
        if isinstance(value, int) and value > _MOST_COUNT:
            raise InvalidArgumentError(
                f"messages: the model's chat template asks for a width or a number of {value:,}, "
                f"but at most {_MOST_COUNT:,} are made"
            )


def _listed(value: Any) -> Any:
    """An iterator as a list: to look at what is in it would use it up."""
    return list(value) if hasattr(value, "__next__") else value


# ----------------------------------------------------------------- the bytes of what is made

_Estimate = Callable[[MemoryBudget, Any, Sequence[Any]], int]
"""Its parameters are the budget, the text or other value, and the arguments."""


def _widened(_: MemoryBudget, text: Any, values: Sequence[Any]) -> int:
    _check_counts(values)
    return 0


def _tabs(_: MemoryBudget, text: str, values: Sequence[Any]) -> int:
    _check_counts(values)
    widths = [value for value in values if isinstance(value, int)]
    return _width(text) * (len(text) + text.count("\t") * max(widths, default=8))


def _replaced(_: MemoryBudget, text: Any, values: Sequence[Any]) -> int:
    text = str(text)
    texts = [value for value in values if not isinstance(value, int)]
    if len(texts) < 2:
        return 0
    old = _as_text(texts[0])
    new = _as_text(texts[1])
    growth = max(len(new) - len(old), 0)
    return _width(text + new) * (len(text) + text.count(old) * growth)


def _joined(budget: MemoryBudget, separator: Any, parts: Any) -> int:
    size = budget.size([parts])
    num_parts = len(parts) if hasattr(parts, "__len__") else 0
    return 4 * size + _width(separator) * len(separator) * num_parts


def _joined_by_method(budget: MemoryBudget, separator: str, values: Sequence[Any]) -> int:
    return _joined(budget, separator, values[0] if values else [])


def _joined_by_filter(budget: MemoryBudget, parts: Any, values: Sequence[Any]) -> int:
    return _joined(budget, _as_text(values[0]) if values else "", parts)


def _split(_: MemoryBudget, text: str, values: Sequence[Any]) -> int:
    separators = [value for value in values if isinstance(value, (str, bytes)) and value]
    for_space = [] if separators else _SPACES
    num_parts = sum(text.count(_as_text(each)) for each in [*separators, *for_space])
    return num_parts * _PART_BYTES


def _translated(budget: MemoryBudget, text: str, values: Sequence[Any]) -> int:
    longest = budget.size(values) if values else 0
    return len(text) * (longest if longest > 64 * _PART_BYTES else _PART_BYTES)


def _formatted(budget: MemoryBudget, text: str, values: Sequence[Any]) -> int:
    fields = _FIELD.findall(text)
    num_characters = len(text)
    size = budget.size(values)
    for field in fields:
        if _INSIDE_FIELD.match(field):
            raise InvalidArgumentError(
                "messages: the model's chat template has a format with a width that is computed"
            )
        widths = [int(digits) for digits in re.findall(r"\d+", field)]
        num_characters += max(widths, default=0) + size
    return 4 * num_characters if len(fields) > 1 else num_characters


def _formatted_by_filter(budget: MemoryBudget, text: Any, values: Sequence[Any]) -> int:
    return _formatted(budget, _as_text(text), values)


def _indented(_: MemoryBudget, text: Any, values: Sequence[Any]) -> int:
    text = _as_text(text)
    widths = [4]
    for value in values:
        widths.append(len(value) if isinstance(value, str) else int(value))
    return _width(text) * (len(text) + (text.count("\n") + 1) * max(widths))


def _wrapped(_: MemoryBudget, text: Any, values: Sequence[Any]) -> int:
    """Something of the arguments stands as often as the text has characters, at the most."""
    lengths = [len(value) for value in values if isinstance(value, (str, list, tuple))]
    return _width(_as_text(text)) * len(_as_text(text)) * (1 + sum(lengths))


def _as_text(value: Any) -> str:
    return value.decode("latin-1") if isinstance(value, bytes) else str(value)


def _width(text: str) -> int:
    """Most bytes of a character."""
    return 1 if text.isascii() else 4


_METHODS: dict[str, _Estimate] = {
    "center": _widened,
    "ljust": _widened,
    "rjust": _widened,
    "zfill": _widened,
    "expandtabs": _tabs,
    "replace": _replaced,
    "join": _joined_by_method,
    "split": _split,
    "rsplit": _split,
    "splitlines": _split,
    "translate": _translated,
    "format": _formatted,
    "format_map": _formatted,
}
_FILTERS: dict[str, _Estimate] = {
    "replace": _replaced,
    "join": _joined_by_filter,
    "format": _formatted_by_filter,
    "indent": _indented,
    "wordwrap": _wrapped,
    "urlize": _wrapped,
    "truncate": _wrapped,
}
