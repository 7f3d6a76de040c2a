"""The engine's compiled grammars, and the requests that wait for one.

A thread of its own compiles: meanwhile the engine makes its steps, and whatever comes for such a
request waits with it. Part of :class:`~jitney.engine.engine.Engine`, which calls it under the lock
of its inbox.
"""

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from jitney.errors import InternalError, InvalidArgumentError, JitneyError
from jitney.messages import Grammar, Message, Submit

_log = logging.getLogger(__name__)

Compile = Callable[[str], Grammar]
"""Compiles ``Submit.grammar``. Raises InvalidArgumentError."""


class Grammars:
    """See the module's docstring."""

    def __init__(
        self, make: Compile, most: int, woken: threading.Condition, inbox: list[Message]
    ) -> None:
        """Keeps the ``most`` grammars used last. What waits no more goes into ``inbox``."""
        self._make = make
        self._most = most
        self._woken = woken
        self._inbox = inbox
        self._kept: OrderedDict[str, Grammar | JitneyError] = OrderedDict()
        self._of: dict[int, Grammar | JitneyError] = {}  # by key: what its Submit needs
        self._thread = ThreadPoolExecutor(1, "jitney-grammars")
        self.waiting: dict[int, list[Message]] = {}
        """By key: a request whose grammar is being compiled, and what has come for it since."""

    def hold(self, message: Message) -> bool:
        """Whether a message has to wait. If not, :meth:`take` has the grammar of a Submit."""
        if message.key in self.waiting:
            self.waiting[message.key].append(message)
            return True
        if not isinstance(message, Submit) or not message.grammar:
            return False
        if message.grammar not in self._kept:
            self.waiting[message.key] = [message]
            self._thread.submit(self._compile, message)
            return True
        self._kept.move_to_end(message.grammar)
        self._of[message.key] = self._kept[message.grammar]
        return False

    def take(self, message: Submit) -> Grammar | None:
        """The grammar of a request, once; None if it has none. Raises what its compilation did."""
        found = self._of.pop(message.key, None)
        if isinstance(found, JitneyError):
            raise found
        return found

    def forget(self) -> None:
        """Drop all that waits."""
        self.waiting.clear()
        self._of.clear()

    def _compile(self, message: Submit) -> None:
        """In the thread."""
        text = message.grammar
        made: Grammar | JitneyError | None = self._kept.get(text)
        if made is None:
            try:
                made = self._make(text)
            except JitneyError as error:
                made = error
            except BaseException:  # a panic of native code is no Exception
                _log.exception("a grammar could not be compiled")
                made = InternalError("the grammar could not be compiled")
        with self._woken:
            self._kept[text] = made
            while len(self._kept) > self._most:
                self._kept.popitem(last=False)
            if message.key in self.waiting:
                self._of[message.key] = made
                self._inbox += self.waiting.pop(message.key)
                self._woken.notify()


def refuse(text: str) -> Grammar:
    """What a model does without a :data:`Compile`."""
    raise InvalidArgumentError("structured_outputs is not supported for this model's tokenizer")
