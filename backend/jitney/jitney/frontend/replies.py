"""What the front keeps of an open request: its inputs until they are encoded, then its reply. Also
the order in which replies are sent, and the sending of final responses, which may have to wait for
shared memory.

Owned by the responder's thread: nothing here is locked. The threads that encode take the inputs;
the sweeper asks which clients have gone.
"""

import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from jitney import stub_memory
from jitney.errors import CancelledError, JitneyError, from_code
from jitney.frontend.channel import Channel
from jitney.frontend.protocol import ClientRequest, PromptLogprobsEncoder, ResponseWriter
from jitney.messages import Cancelled, Failed
from jitney.text.completion import Completion

CLIENT_GONE = "the request was cancelled by its client"
MAX_BURST = 32
"""Most responses that leave without a pause between them. In a burst, a response costs half of what
it costs alone, because the processor's caches still hold what the send before it used."""
MAX_PAUSE_S = 0.02
"""Longest pause that one send adds, so that a single slow send delays the others only briefly."""
MAX_WAIT_S = 0.5
"""A stream that has waited for longer than this is sent without a pause."""


class ClientInputs:
    """What a client sent. Its prompt may have megabytes, so it is let go as soon as possible: when
    a thread begins to encode it, or when the request ends before that."""

    def __init__(self, request: ClientRequest | None = None) -> None:
        self._request = request

    def take(self) -> ClientRequest | None:
        """Take the inputs, to encode them. None: the request has ended."""
        request = self._request
        self._request = None
        return request

    def drop(self) -> None:
        """Let the inputs go, because the request has ended."""
        self._request = None


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request that was accepted: its inputs, and where its responses go."""

    key: int
    """By which front and engine name the request."""
    channel: Channel
    at: float
    """When it came, in monotonic seconds."""
    deadline: float | None
    """In monotonic seconds; None: it has none."""
    size: int = 0
    """Bytes that it counts for in the front's memory: see ``service.MAX_OPEN_BYTES``."""
    request_id: str = ""
    """The client's, for logs and spans."""
    trace: Mapping[str, str] = field(default_factory=dict)
    """The headers of the trace that the request belongs to."""
    tier: str | None = None
    """The name of its tier. None: the model has no tiers."""
    inputs: ClientInputs = field(default_factory=ClientInputs)


@dataclass(slots=True)
class Reply:
    """What a request's client gets, and how much of that is sent."""

    arrival: Arrival
    streamed: bool
    """Whether a response leaves whenever there is something to send. If not, one leaves at the end.
    """
    completion: Completion
    writer: ResponseWriter
    prompt_logprobs: PromptLogprobsEncoder | None = None
    """The prompt's logprobs: set once the engine has reported them, None again once they are sent.
    """
    queued_at: float = 0.0
    """When it joined its line of the :class:`SendQueue`; monotonic seconds."""
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

    @property
    def has_response(self) -> bool:
        """Whether there is a response to send now."""
        completion = self.completion
        if completion.terminal is not None:
            return True
        if not self.streamed or self.cancel_reason:
            return False  # only its final response is sent
        if completion.all_ended:
            # All texts have ended, at stop strings, but the engine has not reported the end yet.
            # The last data must leave with the final response, which carries the timing: wait for
            # that report, one step away.
            return False
        return completion.has_pending

    @property
    def final_error(self) -> JitneyError | None:
        """The error that the reply is to end with. None: it goes on, or ends with data."""
        terminal = self.completion.terminal
        if isinstance(terminal, Failed):
            return from_code(terminal.code, terminal.message)
        if isinstance(terminal, Cancelled) or self.cancel_reason:
            return CancelledError(self.cancel_reason or CLIENT_GONE)
        return None


class SendQueue:
    """The replies that have something to send. There are two lines, one of urgent replies and one
    of the others. The urgent line goes first. In each line, the reply that came first goes first.

    A response costs the engine's cores as much as a token or two. So responses leave in bursts.
    There is a pause after each burst, and tokens made in the pause leave with the next response of
    their request.
    """

    def __init__(self, share: float) -> None:
        """Sending takes ``share`` of the time at most."""
        self.share = share
        # Both by key. A reply is in one of the two lines, not in both.
        self._urgent: OrderedDict[int, Reply] = OrderedDict()
        self._others: OrderedDict[int, Reply] = OrderedDict()
        self._pause_until = 0.0  # monotonic seconds
        # Of the burst that is under way: its responses so far, and the pause that they add up to.
        self._burst_size = 0
        self._burst_pause_s = 0.0

    @property
    def has_urgent(self) -> bool:
        """Whether an urgent reply waits."""
        return bool(self._urgent)

    @property
    def is_empty(self) -> bool:
        """Whether no reply waits."""
        return not self._urgent and not self._others

    @property
    def may_send(self) -> bool:
        """Whether a response may be sent now."""
        return not self.is_empty and self.seconds_to_next() == 0

    def put(self, reply: Reply) -> None:
        """Add a reply to the line that it belongs to now. One that waits already keeps its
        position, unless it has become urgent: then it joins the end of the urgent line."""
        line = self._others
        if reply.is_urgent:
            self._others.pop(reply.key, None)
            line = self._urgent
        if reply.key not in line:
            reply.queued_at = time.monotonic()
            line[reply.key] = reply

    def pop(self) -> Reply:
        """Take out the reply to send next. There must be one."""
        line = self._urgent
        if not line:
            line = self._others
            # A stream that has waited for ``MAX_WAIT_S`` is sent although the pause lasts. Its turn
            # ends the pause for all: the streams behind it have waited nearly as long.
            self._pause_until = 0.0
        _, reply = line.popitem(last=False)
        return reply

    def remove(self, key: int) -> None:
        """Take out a request's reply if it is here."""
        self._urgent.pop(key, None)
        self._others.pop(key, None)

    def seconds_to_next(self) -> float:
        """Seconds until the next response may be sent. There must be a reply.

        First and last responses do not wait for the pause's end, nor does a stream that has waited
        for ``MAX_WAIT_S``.
        """
        if self._urgent:
            return 0
        first = next(iter(self._others.values()))
        may_send_at = min(self._pause_until, first.queued_at + MAX_WAIT_S)
        return max(may_send_at - time.monotonic(), 0)

    def note_sent(self, began: float, ended: float) -> None:
        """Note that a send lasted from ``began`` to ``ended`` (monotonic seconds). The burst ends
        with it, and a pause begins, if the burst has ``MAX_BURST`` responses, or if no reply waits
        but urgent ones."""
        send_s = ended - began
        # The send is ``share`` of the time that send and pause take together.
        pause_s = send_s / self.share - send_s
        self._burst_pause_s += min(pause_s, MAX_PAUSE_S)
        self._burst_size += 1
        if self._burst_size < MAX_BURST and self._others:
            return
        # An urgent reply may have been sent in the pause of an earlier burst: that pause goes on.
        self._pause_until = max(self._pause_until, ended + self._burst_pause_s)
        self._burst_size = 0
        self._burst_pause_s = 0.0


class FinalResponses:
    """Sends final responses in the order in which they come: at once, or as soon as the server's
    shared memory has room."""

    def __init__(self) -> None:
        self._sends: deque[Callable[[], None]] = deque()

    @property
    def is_empty(self) -> bool:
        """Whether no final response waits."""
        return not self._sends

    def send(self, send: Callable[[], None]) -> None:
        """Call ``send``, which sends a final response. If there is no room, or if others wait,
        :meth:`send_waiting` calls it later."""
        if self._sends or not stub_memory.has_room():
            self._sends.append(send)
        else:
            send()

    def send_waiting(self) -> None:
        """Send those that wait, for as long as there is room."""
        while self._sends and stub_memory.has_room():
            self._sends.popleft()()

    def send_all(self, until: float) -> None:
        """Send all that waits. This is the last time: so after ``until`` (monotonic seconds) they
        are sent even if there is no room."""
        while self._sends:
            stub_memory.wait_for_room(until)
            self._sends.popleft()()
