"""The compiled grammars: a :class:`~jitney.engine.source.Source` that keeps those used last."""

from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Sequence
from copy import copy

from jitney.batch import Grammar
from jitney.errors import (
    InternalError,
    InvalidArgumentError,
    JitneyError,
    UnavailableError,
)
from jitney.messages import StepStats, Submit
from jitney.rank import Blocked, MakeQueue, Rank

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
        # A resource of ``source.Source`` has a name and an id. Those of a grammar are its text.

        # Text -> result; the one that was used longest ago comes first.
        self._kept: OrderedDict[str, _Result] = OrderedDict()
        # Texts of the grammars that are to be compiled next.
        self._to_make = MakeQueue()
        # Text of a grammar that is being compiled, or is to be compiled -> keys of the requests
        # that wait for it. A dictionary without values, because it keeps their order.
        self._waiting: dict[str, dict[int, None]] = {}
        # Key of a request that waits -> the text.
        self._text_of: dict[int, str] = {}
        # Key of a request that need not wait -> its result, until take() is called.
        self._results: dict[int, _Result] = {}

    # The methods of ``source.Source``; see there.

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
            self._waiting[name] = {}
            self._to_make.add(name)
        self._to_make.join(name, rank)
        self._waiting[name][key] = None
        self._text_of[key] = name
        return False

    @property
    def has_ids_to_make(self) -> bool:
        return bool(self._to_make)

    def take_id_to_make(self, now: float) -> Hashable | None:
        return self._to_make.take_first(now)

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
        keys = list(self._waiting.pop(id))
        for key in keys:
            del self._text_of[key]
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
            text = self._text_of.pop(key, None)
            if text is None:
                continue
            del self._waiting[text][key]
            # The grammar is dropped, unless others wait for it or its compilation has begun.
            is_dropped = self._to_make.leave(key)
            if is_dropped:
                del self._waiting[text]
        return ()

    def blocked(self, now: float, *, may_preempt: bool) -> Blocked | None:
        """None: a grammar in use does not keep another one from being compiled."""
        return None

    def note_changes(self, keys: Collection[int]) -> bool:
        """A request that is taken back keeps its grammar, so it does not matter."""
        return False

    def report(self, stats: StepStats) -> None:
        """Nothing is reported of grammars."""


def refuse(text: str) -> Grammar:
    """The :data:`Compile` of a model that takes no grammars."""
    raise InvalidArgumentError("structured_outputs is not supported for this model's tokenizer")
