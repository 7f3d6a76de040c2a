"""What other threads give to the engine's thread: messages, resources that were made, and the order
to stop. Each of them wakes the engine if it sleeps.
"""

import threading
from collections import deque

from jitney.engine.making import Made
from jitney.errors import UnavailableError
from jitney.messages import FrontMessage, Submit

UNLOADED = "the model is being unloaded"
"""Why a request is refused, or ended, once the engine was told to stop."""


class Inbox:
    """See the module's docstring."""

    def __init__(self) -> None:
        self._changed = threading.Condition()  # its lock guards the next three
        self._messages: list[FrontMessage] = []
        self._results: deque[Made] = deque()
        self._stopped = False

    # ------------------------------------------------------------------ any thread

    def put(self, message: FrontMessage) -> None:
        """Add a message. After :meth:`stop`, raises UnavailableError for a Submit and drops the
        others."""
        with self._changed:
            if not self._stopped:
                self._messages.append(message)
                self._changed.notify()
            elif isinstance(message, Submit):
                raise UnavailableError(UNLOADED)

    def put_result(self, made: Made) -> None:
        """Add a resource that was made, or that could not be."""
        with self._changed:
            self._results.append(made)
            self._changed.notify()

    def stop(self) -> None:
        """Take no more messages, and tell the engine's thread to stop."""
        with self._changed:
            self._stopped = True
            self._changed.notify()

    # ------------------------------------------------------------------ the engine's thread

    @property
    def stopped(self) -> bool:
        """Whether :meth:`stop` was called."""
        return self._stopped

    @property
    def has_items(self) -> bool:
        """Whether a message or a result is here."""
        return bool(self._messages or self._results)

    def take_messages(self) -> list[FrontMessage]:
        """Take all messages, in the order in which they came."""
        with self._changed:
            messages = self._messages
            self._messages = []
            return messages

    def take_result(self) -> Made | None:
        """Take the result that came first. None: there is none."""
        with self._changed:
            return self._results.popleft() if self._results else None

    def wait(self, timeout: float | None) -> bool:
        """Sleep until a message, a result or the order to stop is here. False: none came within
        ``timeout`` seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: self.has_items or self._stopped, timeout)
