"""The compiled grammars: a :class:`~jitney.engine.pending.Source` that keeps those used last."""

from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from copy import copy

from jitney.batch import Grammar
from jitney.errors import (
    InternalError,
    InvalidArgumentError,
    JitneyError,
    UnavailableError,
)
from jitney.messages import StepStats, Submit
from jitney.rank import Blocked, Rank

Compile = Callable[[str], Grammar]
"""Compiles ``Submit.grammar``. Raises InvalidArgumentError."""

_Result = Grammar | JitneyError
"""A grammar, or why it could not be compiled."""


class Grammars:
    """See the module's docstring. A request that has begun keeps its grammar, even if it is not
    kept here any more."""

    kind = "grammar"

    def __init__(self, compile_grammar: Compile, most: int) -> None:
        """At most ``most`` are kept."""
        self._compile = compile_grammar
        self._most = most
        # For ``pending.Source`` a resource has a name and an id. Here both are the grammar's text.
        # Text -> result; the one that was used longest ago comes first.
        self._kept: OrderedDict[str, _Result] = OrderedDict()
        # Texts that take_ids_to_make() has not returned yet.
        self._new: list[str] = []
        # Text of a grammar that is being compiled, or is about to be -> keys of the requests that
        # wait for it.
        self._waiting: dict[str, list[int]] = {}
        # Key of a request that need not wait -> its result, until take() is called.
        self._results: dict[int, _Result] = {}

    # The methods of ``pending.Source``; see there.

    def name_of(self, message: Submit) -> str | None:
        """None: the request has no grammar."""
        return message.grammar or None

    def claim(self, rank: Rank, name: str, arrival: float, now: float) -> bool:
        key = rank.key
        if name in self._kept:
            self._kept.move_to_end(name)
            self._results[key] = self._kept[name]
            return True
        if name not in self._waiting:
            self._waiting[name] = []
            self._new.append(name)
        self._waiting[name].append(key)
        return False

    def take_ids_to_make(self) -> Sequence[str]:
        new = self._new
        self._new = []
        return new

    def waiting_for(self, id: str) -> list[int]:
        return list(self._waiting[id])

    def make(self, id: str) -> Grammar:
        return self._compile(id)

    def receive(self, id: str, result: _Result, now: float) -> Sequence[int]:
        # What caused these errors may pass, such as a lack of memory. So they are not kept, and the
        # next request compiles the grammar again. Any other error is due to the grammar's text:
        # compiling it again would give the same error.
        if not isinstance(result, InternalError | UnavailableError):
            self._kept[id] = result
        while len(self._kept) > self._most:
            self._kept.popitem(last=False)
        keys = self._waiting.pop(id)
        for key in keys:
            self._results[key] = result
        return keys

    def take(self, key: int) -> Grammar:
        result = self._results.pop(key)
        if isinstance(result, JitneyError):
            # A copy: the error is kept, and each raise would lengthen its traceback, whose frames
            # would stay alive with it.
            raise copy(result)
        return result

    def release(self, keys: Collection[int], now: float) -> Sequence[int]:
        for key in keys:
            self._results.pop(key, None)
        # A grammar that nobody waits for any more is compiled all the same, and kept.
        for waiting in self._waiting.values():
            waiting[:] = [key for key in waiting if key not in keys]
        return ()

    def blocked(self, now: float) -> Blocked | None:
        """None: a grammar that is used keeps no other one from being compiled."""
        return None

    def can_make_again(self, keys: Collection[int]) -> bool:
        """A request that is taken back keeps its grammar."""
        return True

    def report(self, stats: StepStats) -> None:
        """Nothing is reported of grammars."""


def refuse(text: str) -> Grammar:
    """The :data:`Compile` of a model that takes no grammars."""
    raise InvalidArgumentError("structured_outputs is not supported for this model's tokenizer")
