"""From the engine's reports to responses: in order per request, and never in the engine's way.

One thread owns the requests in flight, feeds the engine's events to their completions and sends.
A send is a round trip to the server; while one is under way, events queue up behind it, and a
request's new tokens leave together in its next response. Requests with something to say take
turns, so that one fast stream delays the others by one send at most.

Every request that is opened ends in exactly one final response: its last data, or an error.
"""

import logging
import queue
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from jitney.completion import Completion
from jitney.errors import CancelledError, InternalError, JitneyError, from_code
from jitney.frontend.channel import Channel
from jitney.frontend.metrics import Metrics
from jitney.frontend.protocol import ResponseWriter
from jitney.request import (
    Cancel,
    Cancelled,
    Event,
    Failed,
    Finished,
    Message,
    StepReport,
    Tokens,
)

_LOG = logging.getLogger(__name__)

MAX_PAUSE_S = 0.02
"""Longest pause after one send: a send that was slow for once holds nobody up for long."""


@dataclass(slots=True)
class Opened:
    """A request that the engine is about to get. Its events come later in the same queue."""

    key: int
    channel: Channel
    streamed: bool
    """Whether it gets a response whenever there is something to say, or one."""
    completion: Completion
    writer: ResponseWriter
    arrival: float
    """Monotonic seconds."""


@dataclass(slots=True)
class Reported:
    """A step's report and when it was made (monotonic seconds), because it may wait here."""

    report: StepReport
    at: float


@dataclass(slots=True)
class Abort:
    """End one request, or every request in flight, with this error."""

    error: JitneyError
    key: int | None


@dataclass(slots=True)
class _Stop:
    """End the thread; what is still open is ended with an error first."""


@dataclass(slots=True)
class _Stream:
    """A request in flight."""

    opened: Opened
    queued: bool = False
    """Whether it stands in the line of those that have something to send."""
    last_token_at: dict[int, float] = field(default_factory=dict)
    cancel_reason: str = "the request was cancelled by its client"
    cancelling: bool = False
    """The engine was told to cancel; nothing but the final response is sent any more."""
    begun: bool = False
    """Whether a response has been sent."""

    @property
    def urgent(self) -> bool:
        """Whether a client waits for the next response as for no other: the first or the last."""
        return not self.begun or self.opened.completion.terminal is not None


class Responder:
    """The thread's state. ``send_message`` reaches the engine; it must not block."""

    def __init__(
        self,
        send_message: Callable[[Message], None],
        metrics: Metrics,
        max_pending_tokens: int,
        send_share: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._send_message = send_message
        self._metrics = metrics
        self._max_pending_tokens = max_pending_tokens
        self._clock = clock
        self._inbox: queue.SimpleQueue[Opened | Reported | Abort | _Stop] = queue.SimpleQueue()
        self._streams: dict[int, _Stream] = {}
        self._line: deque[_Stream] = deque()
        self._stopping = False
        self._send_share = send_share
        self._pause_until = 0.0

    # ------------------------------------------------------------------ from other threads

    def open(self, opened: Opened) -> None:
        """Take over a request. Must be called before the engine gets it."""
        self._inbox.put(opened)

    def put(self, report: StepReport) -> None:
        """Take in what the engine reports; the engine's outbox."""
        self._inbox.put(Reported(report, self._clock()))

    def abort(self, error: JitneyError, key: int | None = None) -> None:
        """End request ``key``, or every request opened so far, with ``error``; the engine is told
        to cancel them. A key that has ended is ignored."""
        self._inbox.put(Abort(error, key))

    def stop(self) -> None:
        """End :meth:`run` after what is in the queue now."""
        self._inbox.put(_Stop())

    # ------------------------------------------------------------------ the thread

    def run(self) -> None:
        """Feed and send until stopped. The body of the thread."""
        while not self._stopping:
            self.turn()
        self._abort(InternalError("the model was stopped before the request ended"))

    def turn(self) -> None:
        """Take in everything that has come, then send at most one response. Waits while there is
        nothing to do and while sending has had its share."""
        patience = self._patience()
        try:
            message = self._inbox.get(timeout=patience) if patience != 0 else None
            while True:
                if message is not None:
                    self._take_in(message)
                message = self._inbox.get_nowait()
        except queue.Empty:
            pass
        self._metrics.live(len(self._streams))
        if self._patience() == 0:
            stream = self._line.popleft()
            stream.queued = False
            # Between joining the line and its turn it may have been aborted, or have come to where
            # it must wait for its end.
            if stream.opened.key in self._streams and self._may_send(stream):
                began = self._clock()
                self._answer(stream)
                took = self._clock() - began
                self._pause_until = began + took + min(took / self._send_share - took, MAX_PAUSE_S)
                self._metrics.live(len(self._streams))

    def _patience(self) -> float | None:
        """Seconds until the next response may be sent; None while there is none to send.

        A response costs the engine's cores as much as a token or two. So sending keeps to a share
        of the time, and what is made in a pause leaves with the next response of its stream. First
        and last responses do not wait.
        """
        if not self._line:
            return None
        if self._line[0].urgent:
            return 0
        return max(self._pause_until - self._clock(), 0)

    def _take_in(self, message: Opened | Reported | Abort | _Stop) -> None:
        match message:
            case Opened():
                self._streams[message.key] = _Stream(message)
            case Reported(report, at):
                self._metrics.step(report.stats)
                for event in report.events:
                    stream = self._streams.get(event.key)
                    if stream is not None:  # else it ended here before the engine heard of it
                        self._feed(stream, event, at)
            case Abort(error, key):
                self._abort(error, key)
            case _Stop():
                self._stopping = True

    def _feed(self, stream: _Stream, event: Event, at: float) -> None:
        if isinstance(event, Tokens):
            self._observe_latency(stream, event, at)
        try:
            finishes = stream.opened.completion.feed(event)
        except Exception:
            self._fail(stream)
            return
        for finish in finishes:
            self._send_message(finish)
        if stream.opened.streamed:
            self._bound(stream)
        if not stream.queued and self._may_send(stream):
            stream.queued = True
            if stream.urgent:
                self._line.appendleft(stream)
            else:
                self._line.append(stream)

    def _observe_latency(self, stream: _Stream, tokens: Tokens, at: float) -> None:
        if not stream.last_token_at:
            waited = at - stream.opened.arrival
            self._metrics.observe("jitney_time_to_first_token_seconds", waited)
        last = stream.last_token_at.get(tokens.index)
        if last is not None and tokens.ids:
            each = (at - last) / len(tokens.ids)
            self._metrics.observe("jitney_inter_token_seconds", each, len(tokens.ids))
        stream.last_token_at[tokens.index] = at

    def _bound(self, stream: _Stream) -> None:
        """Cancel a stream whose tokens cannot be sent as fast as they are made."""
        waiting = stream.opened.completion.pending_tokens
        if waiting > self._max_pending_tokens and not stream.cancelling:
            stream.cancelling = True
            stream.cancel_reason = (
                f"{waiting:,} tokens wait to be sent, but at most {self._max_pending_tokens:,} may "
                f"(max_pending_tokens)"
            )
            self._send_message(Cancel(stream.opened.key))

    def _may_send(self, stream: _Stream) -> bool:
        """Whether a response can be made now.

        When the text of all sequences has ended (a stop string) but the engine has not said so
        yet, the last data waits for its word, one step away: the last data response is the final
        one and carries the timing.
        """
        completion = stream.opened.completion
        if completion.terminal is not None:
            return True
        if not stream.opened.streamed or stream.cancelling:
            return False
        return completion.has_pending and not completion.all_ended

    def _answer(self, stream: _Stream) -> None:
        try:
            self._send(stream)
        except Exception:
            self._fail(stream)

    def _send(self, stream: _Stream) -> None:
        completion = stream.opened.completion
        terminal = completion.terminal
        if isinstance(terminal, Failed):
            self._end(stream, from_code(terminal.code, terminal.message))
        elif isinstance(terminal, Cancelled) or stream.cancelling:
            self._end(stream, CancelledError(stream.cancel_reason))
        else:
            self._send_data(stream, terminal)

    def _send_data(self, stream: _Stream, terminal: Finished | None) -> None:
        opened = stream.opened
        tensors = opened.writer.write(
            opened.completion.take(),
            prompt_logprobs=opened.completion.prompt_logprobs,
            timing=None if terminal is None else terminal.timing,
        )
        stream.begun = True
        delivered = opened.channel.send(tensors, final=terminal is not None)
        self._metrics.count("jitney_responses_total")
        if terminal is not None:
            del self._streams[opened.key]
            reasons = [reason for reason in opened.writer.finish_reasons if reason is not None]
            self._metrics.finished(terminal.timing, reasons[-1])
        elif not delivered:
            del self._streams[opened.key]
            self._metrics.outcome("cancelled")
            self._send_message(Cancel(opened.key))

    def _end(self, stream: _Stream, error: JitneyError) -> None:
        del self._streams[stream.opened.key]
        self._metrics.outcome(outcome_of(error))
        if not stream.opened.channel.closed:
            stream.opened.channel.fail(error)

    def _fail(self, stream: _Stream) -> None:
        """Our bug in one request's text must not end the others: called while it is handled."""
        _LOG.exception("request %d could not be answered", stream.opened.key)
        if stream.opened.key in self._streams:
            self._send_message(Cancel(stream.opened.key))
            self._end(stream, InternalError("the output could not be put into text"))

    def _abort(self, error: JitneyError, key: int | None = None) -> None:
        for stream in list(self._streams.values()):
            if key is None or stream.opened.key == key:
                self._send_message(Cancel(stream.opened.key))
                self._end(stream, error)


def outcome_of(error: JitneyError) -> str:
    """Under which name of ``metrics.OUTCOMES`` a request that ended so is counted."""
    return _OUTCOMES.get(error.code, "failed")


_OUTCOMES = {
    "INVALID_ARGUMENT": "refused",
    "UNAVAILABLE": "unavailable",
    "CANCELLED": "cancelled",
    "DEADLINE_EXCEEDED": "deadline",
}
