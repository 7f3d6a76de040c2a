"""What the responder holds of each open request, and the order in which it sends.

Owned by the responder's thread: nothing here is locked.
"""

import time
from collections import OrderedDict
from dataclasses import dataclass, field

from jitney.frontend.channel import Arrival
from jitney.frontend.protocol import ResponseWriter
from jitney.text.completion import Completion

MAX_PAUSE_S = 0.02
"""Longest pause after one send, so that a single slow send delays the others only briefly."""
MAX_WAIT_S = 0.5
"""A stream that has waited for longer than this is sent without a pause."""


@dataclass(slots=True)
class Reply:
    """What a request's client gets, and how much of that is sent."""

    arrival: Arrival
    streamed: bool
    """Whether a response leaves whenever there is something to send. If not, one leaves at the end.
    """
    completion: Completion
    writer: ResponseWriter
    queued_at: float = 0.0
    """When it joined the queue of replies to send; monotonic seconds."""
    last_token_at: dict[int, float] = field(default_factory=dict)
    """Index of a sequence -> when its last tokens came; monotonic seconds."""
    cancel_reason: str = ""
    """Why the responder has told the engine to cancel the request; empty if it has not. Once it is
    set, nothing but the final response is sent."""
    has_begun: bool = False
    """Whether a response has been sent."""
    num_sent: int = 0
    """Tokens that were sent."""

    @property
    def key(self) -> int:
        """The request's, for the engine."""
        return self.arrival.key

    @property
    def is_urgent(self) -> bool:
        """Whether its next response is the first or the last: these are sent without a pause."""
        return not self.has_begun or self.completion.terminal is not None


class SendQueue:
    """The replies that have something to send, each once; first in, first out, urgent ones first.

    A response costs the engine's cores as much as a token or two. So there is a pause after each
    send, and tokens made in the pause leave with the next response of their request.
    """

    def __init__(self, share: float) -> None:
        """Sending takes ``share`` of the time at most."""
        self.share = share
        # By key. A reply is in one of the two.
        self._urgent: OrderedDict[int, Reply] = OrderedDict()
        self._others: OrderedDict[int, Reply] = OrderedDict()
        self._pause_until = 0.0  # monotonic seconds

    @property
    def has_urgent(self) -> bool:
        """Whether an urgent reply waits."""
        return bool(self._urgent)

    def put(self, reply: Reply) -> None:
        """Add a reply. One that waits here already keeps its position, or joins the urgent ones if
        it has become urgent."""
        if reply.is_urgent:
            self._others.pop(reply.key, None)
            self._urgent.setdefault(reply.key, reply)
        elif reply.key not in self._others:
            reply.queued_at = time.monotonic()
            self._others[reply.key] = reply

    def pop(self) -> Reply:
        """Take out the reply to send next. There must be one."""
        queue = self._urgent or self._others
        _, reply = queue.popitem(last=False)
        return reply

    def remove(self, key: int) -> None:
        """Take out a request's reply if it is here."""
        self._urgent.pop(key, None)
        self._others.pop(key, None)

    def seconds_to_next(self) -> float | None:
        """Seconds until the next response may be sent. 0: now. None: no reply is here.

        First and last responses do not wait for the pause's end, nor does a stream that has waited
        for ``MAX_WAIT_S``.
        """
        if self._urgent:
            return 0
        if not self._others:
            return None
        now = time.monotonic()
        first = next(iter(self._others.values()))
        if now - first.queued_at > MAX_WAIT_S:
            return 0
        return max(self._pause_until - now, 0)

    def begin_pause(self, began: float, ended: float) -> None:
        """Note that a send lasted from ``began`` to ``ended`` (monotonic seconds)."""
        seconds = ended - began
        # The send is to be this share of the time that the send and the pause take together.
        pause = seconds / self.share - seconds
        self._pause_until = ended + min(pause, MAX_PAUSE_S)
