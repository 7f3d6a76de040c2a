"""Finds the requests whose clients have gone, queued ones included.

A thread of its own, because each question is a round trip to the server. Owns the list of channels
it watches; new ones come through a queue, closed ones are dropped in passing. What it finds goes
out as :class:`~jitney.messages.Cancel`.
"""

import logging
import queue
import time
from collections.abc import Callable

from jitney.frontend.channel import Channel
from jitney.messages import Cancel

_LOG = logging.getLogger(__name__)

_LARGEST_SHARE = 0.25
"""Questions and responses share one queue to the server: with very many requests there are fewer
sweeps, so that the questions take at most this share of the time."""


class Sweeper:
    """Asks for every watched request once per ``interval_s``."""

    def __init__(self, cancel: Callable[[Cancel], None], interval_s: float) -> None:
        self._cancel = cancel
        self._interval_s = interval_s
        self._new: queue.SimpleQueue[tuple[int, Channel]] = queue.SimpleQueue()
        self._watched: dict[int, Channel] = {}

    def watch(self, key: int, channel: Channel) -> None:
        """From the next sweep on. Any thread."""
        self._new.put((key, channel))

    def turn(self) -> float:
        """Sweep. Returns the seconds until the next sweep."""
        began = time.monotonic()
        self.sweep()
        took = time.monotonic() - began
        return max(self._interval_s - took, took * (1 / _LARGEST_SHARE - 1))

    def sweep(self) -> None:
        """Ask once about each watched request; a cancelled one is reported once and dropped."""
        while not self._new.empty():
            key, channel = self._new.get()
            self._watched[key] = channel
        for key, channel in list(self._watched.items()):
            del self._watched[key]  # so that one that fails does not hold up the others again
            if channel.is_cancelled():
                _LOG.debug("request %d was cancelled by its client", key)
                self._cancel(Cancel(key))
            elif not channel.closed:
                self._watched[key] = channel
