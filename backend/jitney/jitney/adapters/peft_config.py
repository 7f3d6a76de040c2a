"""The configuration of an adapter in PEFT's format: what it may say, and what it says of a layer.
Called by ``peft_files``.

A field that changes the result in a way that Jitney does not compute is refused by name.
"""

import math
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple, TypeGuard

from jitney.errors import InvalidArgumentError

_LARGEST = 1e308
"""A number of the configuration is at most this. JSON has larger integers: for one of these,
``alpha / rank`` would raise OverflowError."""
_MOST_WAYS = 10_000_000
"""Of matching one pattern with one path, by :func:`_most_ways`. They take less than a second. The
engine stands still meanwhile."""
_MOST_WAYS_IN_ALL = 1_000_000_000
"""The same for all patterns and paths together."""
_MOST_PARTS = 20
"""Most repetitions, and most groups, of a pattern whose ways are counted. More are too many."""
_WORDS = re.compile(r"\((?:\?:)?([\w|-]+)\)")
"""A group whose alternatives are plain words, such as ``(q|v)``."""
_FLAGS = re.compile(r"\(\?-?[a-zA-OQ-Z]")
"""A group with flags, such as ``(?x: )``: in it, a space may stand between a group and its
repetition."""
_POSITIVE = f"a number above 0 and at most {_LARGEST:g}"
_WHOLE = f"a whole number above 0 and at most {_LARGEST:g}"


class _Field(NamedTuple):
    """What a field of the configuration may be."""

    default: object
    """Its value if it is absent. Adapters with this value can be computed."""
    others: tuple[object, ...] = ()
    """Other values that can be computed."""


# PEFT's other fields matter for training alone, or say what the tensors' names and shapes say.
_FIELDS = {
    "peft_type": _Field("LORA"),
    "bias": _Field("none"),
    "use_dora": _Field(False),
    "lora_bias": _Field(False),
    "use_qalora": _Field(False),
    "use_bdlora": _Field(None, (False,)),
    "modules_to_save": _Field(None, ([],)),
    "target_parameters": _Field(None, ([],)),
    "trainable_token_indices": _Field(None, ([], {})),
    "alora_invocation_tokens": _Field(None, ([],)),
    "layer_replication": _Field(None, ([],)),
    # PEFT's other ways to initialise an adapter change the weights of the model itself.
    "init_lora_weights": _Field(True, (False, "gaussian", "eva", "orthogonal")),
}


def check_config(config: Mapping[str, Any]) -> None:
    """Raise InvalidArgumentError for a field with a value that is not computed."""
    for name, field in _FIELDS.items():
        allowed = (field.default, *field.others)
        value = config.get(name, field.default)
        if not any(_is_same(value, each) for each in allowed):
            bound = " or ".join(repr(each) for each in allowed)
            raise InvalidArgumentError.of(name, value, bound)
    if not _is_rank(config.get("r")):
        raise InvalidArgumentError.of("r", config.get("r"), _WHOLE)
    if not _is_positive(config.get("lora_alpha")):
        raise InvalidArgumentError.of("lora_alpha", config.get("lora_alpha"), _POSITIVE)
    ranks = config.get("rank_pattern") or {}
    if not isinstance(ranks, dict) or not all(map(_is_rank, ranks.values())):
        raise InvalidArgumentError.of("rank_pattern", ranks, f"an object, each value {_WHOLE}")
    alphas = config.get("alpha_pattern") or {}
    if not isinstance(alphas, dict) or not all(map(_is_positive, alphas.values())):
        raise InvalidArgumentError.of("alpha_pattern", alphas, f"an object, each value {_POSITIVE}")


def _is_same(value: object, allowed: object) -> bool:
    """Whether both are equal and of one type. ``==`` alone takes 0 for False."""
    return type(value) is type(allowed) and value == allowed


def _is_positive(value: object) -> TypeGuard[float]:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return 0 < value <= _LARGEST


def _is_rank(value: object) -> bool:
    """Whether it is a whole number above 0. A float may be one, such as 8.0."""
    return _is_positive(value) and value % 1 == 0


def check_patterns(field: str, patterns: Mapping[str, float], paths: Collection[str]) -> None:
    """Raise InvalidArgumentError for patterns that could take very long to match. Nothing ends a
    match, and the engine stands still meanwhile."""
    longest = max(map(len, paths))
    in_all = 0.0
    for pattern in patterns:
        ways = _most_ways(pattern, longest)
        if ways > _MOST_WAYS:
            bound = "one with fewer repetitions and alternatives, no repeated group and no flags"
            raise InvalidArgumentError.of("a pattern", pattern, bound)
        in_all += ways * len(paths)
    if in_all > _MOST_WAYS_IN_ALL:
        raise InvalidArgumentError(f"{field} has patterns that take too long to match")


def _most_ways(pattern: str, length: int) -> float:
    """How many ways there are at most to match a pattern with a path of that length: those to share
    the path out among the repetitions (one is ``(.*\\.)?``), times those to choose an alternative
    in each group. A repeated group may have far more."""
    plain = re.sub(r"\\.", ".", pattern)  # an escaped character is one that is no letter here
    plain = re.sub(r"\[\^?\]?[^]]*\]", ".", plain)  # and so is a class
    if re.search(r"\)[*+{]", plain) or _FLAGS.search(plain):
        return math.inf
    repetitions = 1 + len(re.findall(r"[*+{]|(?<!\()\?", plain))
    if repetitions > _MOST_PARTS or plain.count("(") > _MOST_PARTS:
        return math.inf
    alternatives = 1
    for words in _WORDS.findall(plain):
        alternatives *= _most_at_one_place(words.split("|"))
    alternatives *= _most_choices(_WORDS.sub(".", plain))
    return math.comb(length + repetitions, repetitions) * alternatives


def _most_at_one_place(words: Sequence[str]) -> int:
    """How many of these words can stand at the same place of a path: they begin one another, such
    as ``1`` and ``12``."""
    return max(sum(word.startswith(other) for other in words) for word in words)


def _most_choices(plain: str) -> int:
    """In how many ways the alternatives of all groups can be chosen at most, and those of the
    pattern itself. Brackets that do not match count as if they did."""
    choices = 1
    open_groups = [1]
    for character in plain:
        if character == "|":
            open_groups[-1] += 1
        elif character == "(":
            open_groups.append(1)
        elif character == ")" and len(open_groups) > 1:
            choices *= open_groups.pop()
    return choices * math.prod(open_groups)


class StatedValues:
    """What a configuration states for each layer."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        """``config`` has passed :func:`check_config`."""
        self._config = config
        # By pattern. Each is compiled once: ``re`` itself keeps only 512, and an adapter may have a
        # pattern for each of its layers, which are thousands.
        self._compiled: dict[str, re.Pattern[str]] = {}

    def rank_of(self, path: str, max_rank: int) -> int:
        """The rank of a layer. Raises InvalidArgumentError if it is out of bounds."""
        rank = int(self._stated_for(path, "rank_pattern", default=self._config["r"]))
        if not 1 <= rank <= max_rank:
            raise InvalidArgumentError.of(f"r of {path}", rank, f"from 1 to {max_rank}")
        return rank

    def alpha_of(self, path: str) -> float:
        """The alpha of a layer: its products are scaled by alpha / rank."""
        return self._stated_for(path, "alpha_pattern", default=self._config["lora_alpha"])

    def _stated_for(self, path: str, field: str, default: float) -> float:
        """The value of the first pattern that matches the end of ``path``, or ``default`` if none
        does. As in PEFT, a pattern is a regular expression for one or more whole parts of the
        path."""
        patterns: Mapping[str, float] = self._config.get(field) or {}  # may be absent or null
        for pattern, value in patterns.items():
            if self._compile(pattern).match(path):
                return value
        return default

    def _compile(self, pattern: str) -> re.Pattern[str]:
        compiled = self._compiled.get(pattern)
        if compiled is None:
            try:
                compiled = re.compile(rf"(.*\.)?({pattern})$")
            except (re.error, OverflowError, RecursionError):  # as of a repetition of 10**10 times
                bound = "a regular expression"
                raise InvalidArgumentError.of("a pattern", pattern, bound) from None
            self._compiled[pattern] = compiled
        return compiled
