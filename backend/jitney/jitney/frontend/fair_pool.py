"""Threads that run the calls of several owners: in turn, at most one call of an owner at a time.

So the many slow calls of one owner wait for each other, and delay those of others by one call at
most.
"""

import logging
import threading
from collections import OrderedDict, deque
from collections.abc import Callable

_LOG = logging.getLogger(__name__)

_Call = Callable[[], object]


class FairPool:
    """See the module's docstring."""

    def __init__(self, num_threads: int, name: str) -> None:
        self._changed = threading.Condition()  # its lock guards the next three
        # Owner -> what waits to be run. The owner whose turn is next comes first.
        self._waiting: OrderedDict[str, deque[_Call]] = OrderedDict()
        self._busy: set[str] = set()  # owners one of whose calls is being run
        self._is_shut_down = False
        for number in range(num_threads):
            threading.Thread(target=self._run, name=f"{name}_{number}", daemon=True).start()

    def submit(self, owner: str, call: _Call) -> None:
        """Have a call run once it is its turn. Raises RuntimeError after :meth:`shutdown`."""
        with self._changed:
            if self._is_shut_down:
                raise RuntimeError("the pool was shut down")
            self._waiting.setdefault(owner, deque()).append(call)
            self._changed.notify()

    def shutdown(self) -> None:
        """Run nothing more: what waits is dropped. What runs goes on."""
        with self._changed:
            self._is_shut_down = True
            self._waiting.clear()
            self._changed.notify_all()

    def _run(self) -> None:
        """In each thread."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_shut_down or self._next_owner() is not None)
                if self._is_shut_down:
                    return
                owner = self._next_owner()
                assert owner is not None
                call = self._take(owner)
            try:
                call()
            except BaseException:  # a panic of native code is no Exception
                _LOG.exception("a call has failed")
            finally:
                with self._changed:
                    self._busy.discard(owner)
                    self._changed.notify()

    def _next_owner(self) -> str | None:
        """The first owner of whom nothing is being run."""
        for owner in self._waiting:
            if owner not in self._busy:
                return owner
        return None

    def _take(self, owner: str) -> _Call:
        """The owner's first call. Its further ones wait until it is its turn again."""
        calls = self._waiting.pop(owner)
        call = calls.popleft()
        if calls:
            self._waiting[owner] = calls
        self._busy.add(owner)
        return call
