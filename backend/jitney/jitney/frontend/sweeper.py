"""Looks for requests that are to end: their client has gone, or their deadline has passed.

Owned by the service. It has a thread of its own, because the server is asked about each request in
a round trip.
"""

import queue
import time
from collections.abc import Iterator

from jitney.frontend.replies import Arrival
from jitney.frontend.responder import Responder

SWEEP_SHARE = 0.05
"""Share of the time that sweeps take. A sweep asks the server about every open request, through the
queue that responses take too. So the more requests are open, the rarer sweeps become."""
RARE_SWEEP_S = 1.0
"""But for the sake of ``SWEEP_SHARE``, no more than so many seconds lie between the begins of two
sweeps. If that is too often for it, sweeps take a larger share of the time."""
MOST_SWEEP_SHARE = 0.25
"""The largest share that sweeps ever take. If one in ``RARE_SWEEP_S`` seconds would take more, they
do become rarer than that."""


class Sweeper:
    """Sweeps over the open requests, again and again."""

    def __init__(self, responder: Responder, shortest_period_s: float) -> None:
        """``shortest_period_s``: from one sweep's begin to the next one's, at least."""
        self._responder = responder
        self._shortest_period_s = shortest_period_s
        self.watched: queue.SimpleQueue[Arrival] = queue.SimpleQueue()
        """Requests whose clients may have gone: all that are open, and some that ended lately. The
        service puts each request here."""

    def turn(self) -> float:
        """Make one sweep. Returns the seconds until the next one is to begin."""
        if self._responder.counts.encoding:
            # Only requests whose prompt is being encoded have their deadline kept here; the engine
            # keeps the others'.
            self._responder.expire()
        began = time.monotonic()
        for key in sweep(self.watched):
            self._responder.cancel(key)
        seconds = time.monotonic() - began
        # From this sweep's begin to the next one's: three rules say how long that is at least.
        by_option = self._shortest_period_s
        by_share = min(seconds / SWEEP_SHARE, RARE_SWEEP_S)
        by_most_share = seconds / MOST_SWEEP_SHARE
        period = max(by_option, by_share, by_most_share)
        return period - seconds


def sweep(watched: "queue.SimpleQueue[Arrival]") -> Iterator[int]:
    """Ask the server once about each request of ``watched``. Yields the keys of the requests whose
    client has gone. Of the others, those that are still open stay in ``watched``."""
    for _ in range(watched.qsize()):
        # A request is taken out before the server is asked. If that raises, this request alone is
        # watched no longer, and the next sweep begins with the request behind it.
        arrival = watched.get()
        if arrival.channel.is_cancelled():
            yield arrival.key
        elif not arrival.channel.closed:
            watched.put(arrival)
