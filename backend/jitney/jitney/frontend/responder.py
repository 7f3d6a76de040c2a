"""From the engine's reports to responses: in order per request, without delaying the engine.

One thread owns the replies, feeds the engine's events to their completions and sends. Other
threads post calls to its inbox. A send is a round trip to the server; while one is under way,
events queue up behind it, and a request's new tokens leave together in its next response. Requests
with something to send take turns, so that one fast stream delays the others by one send at most.

Neither work can starve the other: a turn reads for a bounded time and then may send for as long. If
the reports come faster than they are read, the engine waits until the backlog is short enough.

Every reply ends in exactly one final response: its last data, or an error.
"""

import logging
import queue
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from jitney.core.deadlines import Deadlines
from jitney.errors import (
    CancelledError,
    DeadlineExceededError,
    InternalError,
    JitneyError,
    UnavailableError,
    from_code,
)
from jitney.frontend.channel import Arrival, NamedArray
from jitney.frontend.metrics import ModelMetrics, OpenCounts
from jitney.frontend.protocol import ResponseWriter
from jitney.frontend.spans import RequestSpans
from jitney.messages import (
    Cancel,
    Cancelled,
    Event,
    Failed,
    Finished,
    Message,
    StepReport,
    Submit,
    Timing,
    Tokens,
)
from jitney.text.completion import Completion

_LOG = logging.getLogger(__name__)

MAX_PAUSE_S = 0.02
"""Longest pause after one send, so that a single slow send delays the others only briefly."""
MAX_WAIT_S = 0.5
"""A stream that has waited for longer than this is sent without a pause."""
MAX_READ_S = 0.005
"""Seconds after which a turn makes no further call of its inbox."""
MAX_REPORTS = 64
"""Reports that may wait to be read. With so many, the engine waits before it adds another one."""
MAX_HOLD_S = 1.0
"""Longest such wait of the engine. Then the report is added in any case, so that an engine does not
hang because a send hangs."""
LAST_SENDS_S = 3.0
"""Seconds for sending the replies that have ended when the responder is stopped."""

_CLIENT_GONE = "the request was cancelled by its client"


@dataclass(slots=True)
class Reply:
    """What a request's client gets, and how far that is sent."""

    arrival: Arrival
    streamed: bool
    """Whether it gets a response whenever there is something to send, or one."""
    completion: Completion
    writer: ResponseWriter
    queued_at: float = 0.0
    """When it joined the queue of those that have something to send; monotonic seconds."""
    last_token_at: dict[int, float] = field(default_factory=dict)
    cancel_reason: str = ""
    """Why the responder has told the engine to cancel it; empty if it has not. Once it is set,
    nothing but the final response is sent."""
    begun: bool = False
    """Whether a response has been sent."""
    num_sent: int = 0
    """Tokens."""

    @property
    def key(self) -> int:
        """The request's, for the engine."""
        return self.arrival.key

    @property
    def urgent(self) -> bool:
        """Whether its next response is the first or the last: these are sent without a pause."""
        return not self.begun or self.completion.terminal is not None


class Responder:
    """The thread's state. ``send_message`` reaches the engine; it must not block."""

    def __init__(
        self,
        send_message: Callable[[Message], None],
        metrics: ModelMetrics,
        max_pending_tokens: int,
        send_share: float,
        spans: RequestSpans | None = None,
    ) -> None:
        """``max_pending_tokens`` may wait to be sent to one stream. Sending takes ``send_share`` of
        the time at most."""
        self._send_message = send_message
        self._metrics = metrics
        self._spans = spans
        self._max_pending_tokens = max_pending_tokens
        self._send_share = send_share
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._report_was_read = threading.Condition()
        self._backlog = 0  # reports in the inbox; guarded by _report_was_read
        # Every open request is in one of these two, by its key.
        self._encoding: dict[int, Arrival] = {}
        self._replies: dict[int, Reply] = {}
        self._deadlines = Deadlines()  # of those in _encoding; the engine keeps the others'
        # Replies with something to send, each in one of the two; first in, first out.
        self._urgent: OrderedDict[int, Reply] = OrderedDict()
        self._queue: OrderedDict[int, Reply] = OrderedDict()
        self._stopping = False
        self._pause_until = 0.0
        self.ended_bytes = 0
        """Sum of ``Arrival.size`` of all requests that have ended."""

    # ------------------------------------------------------------------ from other threads

    def post(self, work: Callable[..., None], *args: object) -> None:
        """Have the responder's thread call ``work``: one of the methods below."""
        self._inbox.put(partial(work, *args))

    @property
    def counts(self) -> OpenCounts:
        """How much is open now."""
        return OpenCounts(len(self._encoding), len(self._replies), self._backlog)

    def put(self, report: StepReport) -> None:
        """Take a report; this object is the engine's outbox. Waits while the backlog is full, for
        ``MAX_HOLD_S`` at most."""
        at = time.monotonic()
        with self._report_was_read:
            self._report_was_read.wait_for(lambda: self._backlog < MAX_REPORTS, MAX_HOLD_S)
            self._backlog += 1
        self._inbox.put(partial(self._read, report, at))

    # ------------------------------------------------------------------ posted

    def add(self, arrival: Arrival) -> None:
        """Take over a request: from now on it ends here and nowhere else."""
        self._encoding[arrival.key] = arrival
        self._deadlines.add(arrival)

    def begin(self, reply: Reply, submit: Submit) -> None:
        """The prompt of a request is encoded. ``submit`` goes to the engine unless the request has
        ended meanwhile."""
        arrival = self._encoding.pop(reply.key, None)
        if arrival is not None:
            self._deadlines.remove(arrival)
            self._replies[reply.key] = reply
            self._guard(reply, lambda: self._send_message(submit))

    def answer(self, arrival: Arrival, tensors: Sequence[NamedArray]) -> None:
        """Send what needed no engine, and end the request unless it has ended meanwhile."""
        if arrival.key in self._encoding:
            try:
                arrival.channel.send(tensors, final=True)
                self._forget(arrival)
            except JitneyError as error:
                self._end(arrival, error)

    def cancel(self, key: int) -> None:
        """A client has gone. A key that has ended is ignored."""
        if key in self._encoding:
            self._end(self._encoding[key], CancelledError(_CLIENT_GONE))
        else:
            self._send_message(Cancel(key))

    def expire(self) -> None:
        """End the requests whose deadline has passed while their prompt is encoded."""
        for key in self._deadlines.reached(time.monotonic()):
            arrival = self._encoding[key]
            assert arrival.deadline is not None
            state = "the prompt was not encoded yet"
            error = DeadlineExceededError.of_request(arrival.at, arrival.deadline, state)
            self._end(arrival, error)

    def abort(self, error: JitneyError, key: int | None = None) -> None:
        """End request ``key``, or every request added so far, with ``error``; the engine is told
        to cancel them. A request whose end only has to be sent is left alone."""
        for arrival in self._open():
            reply = self._replies.get(arrival.key)
            ended = reply is not None and reply.completion.terminal is not None
            if not ended and key in (None, arrival.key):
                self._end(arrival, error)

    def stop(self) -> None:
        """End the thread after what is in the inbox now."""
        self._stopping = True

    # ------------------------------------------------------------------ the thread

    def turn(self) -> float | None:
        """One turn of the worker: make the calls in the inbox, then send responses, at least one,
        for as long as the calls took.

        If no response may be sent now, waits for the next call, or until one may. Returns 0, which
        is the pause before the next turn; None once it was stopped and every request has ended.
        """
        seconds = self._read_inbox()
        until = time.monotonic() + seconds
        while self._seconds_to_next_send() == 0:
            self._send_next()
            if time.monotonic() >= until:
                break
        if not self._stopping:
            return 0
        self._end_all()
        return None

    def _read_inbox(self) -> float:
        """Wait for a call until a response may be sent, then make the calls that have come, for a
        bounded time. Returns the seconds that the calls took."""
        # None: there is nothing to send, so wait for a call without a limit.
        longest_wait = 0 if self._stopping else self._seconds_to_next_send()
        try:
            call = self._inbox.get(block=longest_wait != 0, timeout=longest_wait)
        except queue.Empty:
            return 0.0
        began = time.monotonic()
        while True:
            call()
            seconds = time.monotonic() - began
            if seconds > MAX_READ_S or self._inbox.empty():
                return seconds
            call = self._inbox.get_nowait()

    def _seconds_to_next_send(self) -> float | None:
        """Seconds until the next response may be sent; 0: now; None: there is none to send.

        A response costs the engine's cores as much as a token or two. So there is a pause after
        each, and tokens made in the pause leave with the next response of their request. First and
        last responses do not wait, nor does a stream that has waited for ``MAX_WAIT_S``.
        """
        if self._urgent:
            return 0
        if not self._queue:
            return None
        now = time.monotonic()
        first = next(iter(self._queue.values()))
        if now - first.queued_at > MAX_WAIT_S:
            return 0
        return max(self._pause_until - now, 0)

    def _send_next(self) -> None:
        _, reply = (self._urgent or self._queue).popitem(last=False)
        if not self._may_send(reply):
            return  # since it was queued, it has begun to wait for its terminal event
        began = time.monotonic()
        self._guard(reply, partial(self._send, reply))
        ended = time.monotonic()
        # The send and the pause together are 1 / send_share times as long as the send.
        seconds = ended - began
        pause = seconds / self._send_share - seconds
        self._pause_until = ended + min(pause, MAX_PAUSE_S)

    def _end_all(self) -> None:
        """Send what has ended, for a bounded time; all others end with an error."""
        until = time.monotonic() + LAST_SENDS_S
        while self._urgent and time.monotonic() < until:
            self._send_next()
        for arrival in self._open():
            self._end(arrival, UnavailableError("the model is being unloaded"))

    # ------------------------------------------------------------------ what the engine reports

    def _read(self, report: StepReport, at: float) -> None:
        """A step's report that was made at ``at`` (monotonic seconds)."""
        with self._report_was_read:
            self._backlog -= 1
            self._report_was_read.notify()
        for event in report.events:
            reply = self._replies.get(event.key)
            if reply is not None:  # else it ended here first
                self._guard(reply, partial(self._feed, reply, event, at))
        self._metrics.step(report.stats)

    def _feed(self, reply: Reply, event: Event, at: float) -> None:
        if isinstance(event, Tokens):
            self._observe_latency(reply, event, at)
            if reply.streamed:
                self._cancel_if_too_slow(reply)
        for finish in reply.completion.feed(event):
            self._send_message(finish)
        if self._may_send(reply):
            self._line_up(reply)

    def _line_up(self, reply: Reply) -> None:
        """Put it into the queue of those that have something to send, unless it is there."""
        if reply.urgent:
            self._queue.pop(reply.key, None)
            self._urgent.setdefault(reply.key, reply)
        elif reply.key not in self._queue:
            reply.queued_at = time.monotonic()
            self._queue[reply.key] = reply

    def _observe_latency(self, reply: Reply, tokens: Tokens, at: float) -> None:
        tier = reply.arrival.tier
        if not reply.last_token_at:
            waited = at - reply.arrival.at
            self._metrics.observe("jitney_time_to_first_token_seconds", waited, tier=tier)
        last = reply.last_token_at.get(tokens.index)
        if last is not None and tokens.ids:
            count = len(tokens.ids)
            each = (at - last) / count
            self._metrics.observe("jitney_inter_token_seconds", each, times=count, tier=tier)
        reply.last_token_at[tokens.index] = at

    def _cancel_if_too_slow(self, reply: Reply) -> None:
        """Cancel a stream if too many of its tokens wait: they cannot be sent as fast as they are
        made. To be called before new tokens are added, because a grammar may force any number of
        tokens at once, which is no sign of slowness."""
        waiting = reply.completion.pending_tokens
        if waiting > self._max_pending_tokens and not reply.cancel_reason:
            reply.cancel_reason = (
                f"{waiting:,} tokens wait to be sent, but at most {self._max_pending_tokens:,} may "
                f"(max_pending_tokens)"
            )
            self._send_message(Cancel(reply.key))

    # ------------------------------------------------------------------ a response

    def _may_send(self, reply: Reply) -> bool:
        """Whether a response can be made now."""
        completion = reply.completion
        if completion.terminal is not None:
            return True
        if not reply.streamed or reply.cancel_reason:
            return False  # only its final response is sent
        if completion.all_ended:
            # All texts have ended, at stop strings, but the engine has not reported the end yet.
            # The last data must leave with the final response, which carries the timing: wait for
            # that report, one step away.
            return False
        return completion.has_pending

    def _send(self, reply: Reply) -> None:
        """Send the next response: the final error, or what is new, up to a response's largest size.
        What does not fit is sent when the others have had a turn."""
        error = _final_error(reply)
        if error is not None:
            self._end(reply.arrival, error)
            return
        completion = reply.completion
        if not reply.writer.add_prompt(completion.prompt_logprobs or []):
            self._line_up(reply)  # a part is encoded; nothing is sent before the rest is
            return
        deltas = completion.take(reply.writer.most if reply.streamed else sys.maxsize)
        timing = None  # set for the final response only
        if isinstance(completion.terminal, Finished) and not completion.has_pending:
            timing = completion.terminal.timing
        tensors = reply.writer.write(deltas, timing)
        reply.begun = True
        reply.num_sent += sum(len(delta.ids) for delta in deltas)
        reply.arrival.channel.send(tensors, final=timing is not None)
        self._metrics.count("jitney_responses_total")
        if completion.has_pending:
            self._line_up(reply)
        elif timing is not None:
            self._note_finished(reply, timing, [str(delta.finish_reason) for delta in deltas])

    def _note_finished(self, reply: Reply, timing: Timing, reasons: list[str]) -> None:
        """Its final response has been sent."""
        self._forget(reply.arrival)
        self._metrics.finished(timing, reasons[-1], reply.arrival.tier)
        if self._spans is not None:
            self._spans.finished(
                reply.arrival,
                timing=timing,
                reasons=reasons,
                num_prompt=reply.writer.num_prompt_tokens,
                num_tokens=reply.num_sent,
            )

    def _open(self) -> list[Arrival]:
        """Every request that has not ended."""
        return [*(reply.arrival for reply in self._replies.values()), *self._encoding.values()]

    def _forget(self, arrival: Arrival) -> None:
        """A request has ended."""
        key = arrival.key
        self.ended_bytes += arrival.size
        if key in self._encoding:
            del self._encoding[key]
            self._deadlines.remove(arrival)
        else:
            del self._replies[key]
            self._urgent.pop(key, None)
            self._queue.pop(key, None)

    def _end(self, arrival: Arrival, error: JitneyError) -> None:
        """End a request that is open with ``error``; the engine is told to cancel it."""
        if arrival.key in self._replies or arrival.key in self._encoding:
            self._forget(arrival)
            self._metrics.failed(error, arrival.tier)
            arrival.channel.fail(error)
            self._send_message(Cancel(arrival.key))
            if self._spans is not None:
                self._spans.failed(arrival, error)

    def _guard(self, reply: Reply, work: Callable[[], None]) -> None:
        """Call ``work``, and end this one request if that raises."""
        try:
            work()
        except (CancelledError, UnavailableError, InternalError) as error:
            # The client has gone, the engine takes no more requests, or a send has failed.
            if isinstance(error, InternalError):
                self._metrics.count("jitney_send_failures_total")
            self._end(reply.arrival, error)
        except Exception:  # our bug
            _LOG.exception("request %r could not be answered", reply.arrival.request_id)
            self._metrics.count("jitney_thread_errors_total")
            self._end(reply.arrival, InternalError("the request could not be answered"))


def _final_error(reply: Reply) -> JitneyError | None:
    """The error that the reply has to end with; None if there is none."""
    terminal = reply.completion.terminal
    if isinstance(terminal, Failed):
        return from_code(terminal.code, terminal.message)
    if isinstance(terminal, Cancelled) or reply.cancel_reason:
        return CancelledError(reply.cancel_reason or _CLIENT_GONE)
    return None
