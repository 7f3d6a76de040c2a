"""From the engine's reports to responses: in order per request, without delaying the engine.

One thread owns the replies, feeds the engine's events to their completions and sends. A public
method may be called from any thread: it puts a call of a private method into the inbox of that one
thread. A send is a round trip to the server. While one is under way, events gather in the inbox,
and a request's new tokens leave together in its next response. Requests with something to send take
turns, so that one fast stream delays the others by one send at most.

Neither reading the inbox nor sending can starve the other: a turn reads for a bounded time, and
then it sends for as long as it has read. If reports come faster than they are read, the engine
waits until fewer of them are in the inbox.

Every request ends in exactly one final response: its last data, or an error. The server takes no
other one if that fails. So while its shared memory has no room, nothing is sent: replies stay in
their queue, and errors and the responses of tasks are held back.
"""

import logging
import queue
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

from jitney import stub_memory
from jitney.core.deadlines import Deadlines
from jitney.errors import (
    CancelledError,
    DeadlineExceededError,
    InternalError,
    JitneyError,
    UnavailableError,
)
from jitney.frontend.channel import Channel, NamedArray, SendError
from jitney.frontend.metrics import ModelMetrics, OpenCounts
from jitney.frontend.replies import CLIENT_GONE, Arrival, FinalResponses, Reply, SendQueue
from jitney.frontend.spans import RequestSpans
from jitney.messages import (
    Cancel,
    Event,
    Finished,
    FrontMessage,
    PromptLogprobs,
    StepReport,
    Submit,
    Timing,
    Tokens,
)

_LOG = logging.getLogger(__name__)

MAX_READ_S = 0.005
"""Seconds after which a turn makes no further call of its inbox."""
MAX_REPORTS = 64
"""Reports that may wait to be read. With so many, the engine waits before it adds another one."""
MAX_HOLD_S = 1.0
"""Longest such wait of the engine, in seconds. After it the report is added in any case, so that
the engine does not hang because a send hangs."""
LAST_SENDS_S = 3.0
"""Seconds in which a responder that is stopped sends the ends of the requests that have ended."""


class Responder:
    """Answers the requests of one model instance. See the module's docstring."""

    def __init__(
        self,
        tell_engine: Callable[[FrontMessage], None],
        metrics: ModelMetrics,
        max_pending_tokens: int,
        send_share: float,
        spans: RequestSpans | None = None,
    ) -> None:
        """``tell_engine`` hands a message to the engine and must not block. A stream of which more
        than ``max_pending_tokens`` tokens wait to be sent is cancelled. Sending takes
        ``send_share`` of the time at most."""
        self._tell_engine = tell_engine
        self._metrics = metrics
        self._spans = spans
        self._max_pending_tokens = max_pending_tokens
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._report_was_read = threading.Condition()
        self._backlog = 0  # reports in the inbox; guarded by _report_was_read
        # Every open request is in one of these two, by its key: its prompt is being encoded, or it
        # was submitted to the engine.
        self._encoding: dict[int, Arrival] = {}
        self._replies: dict[int, Reply] = {}
        self._deadlines = Deadlines()  # of the requests in _encoding; the engine keeps the others'
        self._send_queue = SendQueue(send_share)
        # Sends errors and the responses of tasks, once the shared memory has room. A request whose
        # error waits there has ended, and nothing else is kept of it.
        self._final_responses = FinalResponses()
        self._stopping = False
        self.ended_bytes = 0
        """Sum of ``Arrival.size`` of all requests that have ended."""

    # ------------------------------------------------------------------ from other threads

    @property
    def counts(self) -> OpenCounts:
        """How much is open now."""
        return OpenCounts(
            encoding=len(self._encoding), submitted=len(self._replies), reports=self._backlog
        )

    def put(self, report: StepReport) -> None:
        """Apply a report. The engine calls this, because this object is its outbox. While
        ``MAX_REPORTS`` reports are unread, the call waits, for ``MAX_HOLD_S`` at most."""
        at = time.monotonic()
        with self._report_was_read:
            self._report_was_read.wait_for(lambda: self._backlog < MAX_REPORTS, MAX_HOLD_S)
            self._backlog += 1
        self._post(self._apply_report, report, at)

    def add(self, arrival: Arrival) -> None:
        """Take over a request: from now on it ends here and nowhere else."""
        self._post(self._add, arrival)

    def begin(self, reply: Reply, submit: Submit) -> None:
        """The prompt of a request is encoded. ``submit`` goes to the engine unless the request has
        ended meanwhile."""
        self._post(self._begin, reply, submit)

    def answer(self, arrival: Arrival, tensors: Sequence[NamedArray]) -> None:
        """Send the only response of a request that needs no engine, unless the request has ended
        meanwhile."""
        self._post(self._answer, arrival, tensors)

    def refuse(self, channel: Channel, error: JitneyError) -> None:
        """End a request that was never added. ``error`` is sent once the server's shared memory has
        room for it."""
        self._post(self._final_responses.send, partial(channel.fail, error))

    def cancel(self, key: int) -> None:
        """The client of a request has gone. Does nothing if the request has ended."""
        self._post(self._cancel, key)

    def expire(self) -> None:
        """End the requests whose deadline has passed while their prompt is encoded."""
        self._post(self._expire)

    def abort(self, key: int, error: JitneyError) -> None:
        """End a request with ``error``. The engine is told to cancel it. A request that has its
        terminal event ends with that instead."""
        self._post(self._abort, key, error)

    def abort_all(self, error: JitneyError) -> None:
        """:meth:`abort` every open request."""
        self._post(self._abort_all, error)

    def stop(self) -> None:
        """End the thread once the calls that are in the inbox now are made."""
        self._post(self._stop)

    def _post(self, work: Callable[..., None], *args: object) -> None:
        """Have the responder's thread call ``work``."""
        self._inbox.put(partial(work, *args))

    # ------------------------------------------------------------------ what the thread calls then

    def _add(self, arrival: Arrival) -> None:
        self._encoding[arrival.key] = arrival
        self._deadlines.add(arrival)

    def _begin(self, reply: Reply, submit: Submit) -> None:
        arrival = self._encoding.pop(reply.key, None)
        if arrival is not None:
            self._deadlines.remove(arrival)
            self._replies[reply.key] = reply
            self._guard(arrival, partial(self._tell_engine, submit))

    def _answer(self, arrival: Arrival, tensors: Sequence[NamedArray]) -> None:
        send_response = partial(self._send_only_response, arrival, tensors)
        self._final_responses.send(partial(self._guard, arrival, send_response))

    def _cancel(self, key: int) -> None:
        if key in self._encoding:
            self._end(self._encoding[key], CancelledError(CLIENT_GONE))
        else:
            self._tell_engine(Cancel(key))  # the engine ignores an unknown or ended request

    def _expire(self) -> None:
        for key in self._deadlines.reached(time.monotonic()):
            arrival = self._encoding[key]
            assert arrival.deadline is not None
            state = "the prompt was not encoded yet"
            error = DeadlineExceededError.of_request(arrival.at, arrival.deadline, state)
            self._end(arrival, error)

    def _abort(self, key: int, error: JitneyError) -> None:
        reply = self._replies.get(key)
        if reply is None:
            arrival = self._encoding.get(key)
            if arrival is not None:
                self._end(arrival, error)
        elif reply.completion.terminal is None:
            self._end(reply.arrival, error)

    def _abort_all(self, error: JitneyError) -> None:
        for arrival in self._open():
            self._abort(arrival.key, error)

    def _stop(self) -> None:
        self._stopping = True

    # ------------------------------------------------------------------ the thread

    def turn(self) -> float | None:
        """One turn of the worker: make the calls in the inbox, send final responses that had to
        wait, then send replies for as long as the calls took.

        If no response may be sent now, it first waits for a call, or until a response may be sent.
        Returns the pause before the next turn, 0 seconds; or None, once it was stopped and every
        request has ended.
        """
        seconds = self._read_inbox()
        self._final_responses.send_waiting()
        self._send_responses_for(seconds)
        if not self._stopping:
            return 0
        self._end_all()
        return None

    def _read_inbox(self) -> float:
        """Wait for a call, then make the calls that have come, for a bounded time. Returns the
        seconds that they took, without the wait."""
        call = self._first_call()
        if call is None:
            return 0.0
        began = time.monotonic()
        while True:
            call()
            seconds = time.monotonic() - began
            if seconds > MAX_READ_S or self._inbox.empty():
                return seconds
            call = self._inbox.get_nowait()

    def _first_call(self) -> Callable[[], None] | None:
        """Wait for a call, at most until a response may be sent. None: there was none."""
        try:
            return self._inbox.get(timeout=self._most_wait())
        except queue.Empty:
            return None

    def _most_wait(self) -> float | None:
        """Seconds until there is something to do beside the calls of the inbox. None: only a call
        can bring something."""
        # The turn in which ``_stopping`` is set is the last one, unless it raises: then the worker
        # makes this turn after it. It must not wait for a call, because perhaps none comes.
        if self._stopping:
            return 0.0
        if self._send_queue.may_send or not self._final_responses.is_empty:
            return 0.0 if stub_memory.has_room() else stub_memory.WAIT_S
        if self._send_queue.is_empty:
            return None
        return self._send_queue.seconds_to_next()

    def _send_responses_for(self, seconds: float) -> None:
        """Send responses until so many seconds have passed, or until none may be sent now. The
        first one is sent however few the seconds are."""
        until = time.monotonic() + seconds
        while self._send_queue.may_send and stub_memory.has_room():
            self._handle_next_reply()
            if time.monotonic() >= until:
                return

    def _handle_next_reply(self) -> None:
        """Take the first reply out of the queue, and send its response or do a part of the work for
        it."""
        reply = self._send_queue.pop()
        began = time.monotonic()
        self._guard(reply.arrival, partial(self._advance, reply))
        self._send_queue.note_sent(began, ended=time.monotonic())

    def _end_all(self) -> None:
        """Send the final responses of requests that the engine has finished, for a bounded time.
        All other requests end with an error."""
        until = time.monotonic() + LAST_SENDS_S
        # Urgent: those with a terminal event, and streams that have had no response yet.
        while self._send_queue.has_urgent and stub_memory.wait_for_room(until):
            self._handle_next_reply()
        for arrival in self._open():
            self._end(arrival, UnavailableError("the model is being unloaded"))
        self._final_responses.send_all(until)

    # ------------------------------------------------------------------ what the engine reports

    def _apply_report(self, report: StepReport, at: float) -> None:
        """Apply a step's report that was made at ``at`` (monotonic seconds)."""
        with self._report_was_read:
            self._backlog -= 1
            self._report_was_read.notify()
        for event in report.events:
            reply = self._replies.get(event.key)
            if reply is not None:  # None: the request has ended here, before the engine ended it
                self._guard(reply.arrival, partial(self._apply_event, reply, event, at))
        self._metrics.add_step(report.stats)

    def _apply_event(self, reply: Reply, event: Event, at: float) -> None:
        if isinstance(event, Tokens):
            self._observe_latency(reply, event, at)
            if reply.streamed:
                self._cancel_if_too_slow(reply)
        if isinstance(event, PromptLogprobs):
            reply.prompt_logprobs = reply.writer.begin_prompt_logprobs(event.logprobs)
        finish = reply.completion.feed(event)
        if finish is not None:
            self._tell_engine(finish)
        if reply.has_response:
            self._send_queue.put(reply)
        else:
            # Nothing is sent now, although an earlier event may have put the reply into the queue.
            # Either this event has ended the last text, at a stop string. Or too many tokens wait,
            # and the reply was cancelled above. In both cases it waits for the engine's terminal
            # event.
            self._send_queue.remove(reply.key)

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
        """Cancel a stream if too many of its tokens wait: they are not sent as fast as they are
        made. Called before the tokens of a step are added, so that only those of earlier steps
        count: a grammar may force very many in one step, however fast they are sent."""
        waiting = reply.completion.pending_tokens
        if waiting > self._max_pending_tokens and not reply.cancel_reason:
            reply.cancel_reason = (
                f"{waiting:,} tokens wait to be sent, but at most {self._max_pending_tokens:,} may "
                f"(max_pending_tokens)"
            )
            self._tell_engine(Cancel(reply.key))

    # ------------------------------------------------------------------ a response

    def _advance(self, reply: Reply) -> None:
        """Do the next thing for a reply that has a response: end it with an error, encode a part of
        its prompt's logprobs, or send."""
        error = reply.final_error
        if error is not None:
            self._end(reply.arrival, error)
            return
        prompt_logprobs = reply.prompt_logprobs
        if prompt_logprobs is not None and not prompt_logprobs.is_complete:
            # The response has to wait until all parts are encoded. The others get their turns.
            prompt_logprobs.encode_next_part()
            self._send_queue.put(reply)
            return
        self._send_data(reply)

    def _send_data(self, reply: Reply) -> None:
        """Send what is new, up to a response's largest size. The rest is sent when the others have
        had a turn."""
        completion = reply.completion
        most = reply.writer.max_tokens_per_response if reply.streamed else sys.maxsize
        deltas = completion.take(most)
        # The last response has the timing. As long as it is None, another response follows.
        timing = None
        if isinstance(completion.terminal, Finished) and not completion.has_pending:
            timing = completion.terminal.timing
        tensors = reply.writer.write(deltas, timing, reply.prompt_logprobs)
        reply.prompt_logprobs = None
        reply.has_begun = True
        reply.num_sent += sum(len(delta.ids) for delta in deltas)
        reply.arrival.channel.send(tensors, final=timing is not None)
        self._metrics.count("jitney_responses_total")
        if timing is not None:
            self._note_finished(reply, timing, [str(delta.finish_reason) for delta in deltas])
        elif completion.has_pending:
            self._send_queue.put(reply)

    def _send_only_response(self, arrival: Arrival, tensors: Sequence[NamedArray]) -> None:
        if arrival.key in self._encoding:
            arrival.channel.send(tensors, final=True)
            self._forget(arrival)

    def _note_finished(self, reply: Reply, timing: Timing, reasons: list[str]) -> None:
        """Note that a final response with data has been sent. ``reasons`` has the finish reason of
        each sequence."""
        self._forget(reply.arrival)
        # A request counts once, by the sequence with the highest index.
        self._metrics.count_finished(
            timing,
            reasons[-1],
            prompt_tokens=reply.writer.num_prompt,
            generated_tokens=reply.num_sent,
            tier=reply.arrival.tier,
        )
        if self._spans is not None:
            self._spans.finished(
                reply.arrival,
                timing=timing,
                reasons=reasons,
                num_prompt=reply.writer.num_prompt,
                num_tokens=reply.num_sent,
            )

    def _open(self) -> list[Arrival]:
        """Every request that has not ended."""
        submitted = [reply.arrival for reply in self._replies.values()]
        return submitted + list(self._encoding.values())

    def _forget(self, arrival: Arrival) -> None:
        """Drop what is kept of an open request, because it ends."""
        key = arrival.key
        self.ended_bytes += arrival.size
        if key in self._encoding:
            del self._encoding[key]
            self._deadlines.remove(arrival)
            arrival.inputs.drop()
        else:
            del self._replies[key]
            self._send_queue.remove(key)

    def _end(self, arrival: Arrival, error: JitneyError) -> None:
        """End a request with ``error``, and tell the engine to cancel it: an engine that has ended
        it already ignores that. Does nothing if the request has ended here."""
        if arrival.key not in self._replies and arrival.key not in self._encoding:
            return
        self._forget(arrival)
        self._metrics.count_failed(error, arrival.tier)
        self._final_responses.send(partial(arrival.channel.fail, error))
        self._tell_engine(Cancel(arrival.key))
        if self._spans is not None:
            self._spans.failed(arrival, error)

    def _guard(self, arrival: Arrival, work: Callable[[], None]) -> None:
        """Call ``work`` for a request. If that raises, this one request ends."""
        try:
            work()
        except (CancelledError, UnavailableError) as error:
            # The client has gone, or the engine takes no more requests.
            self._end(arrival, error)
        except SendError as error:
            self._metrics.count("jitney_send_failures_total")
            self._end(arrival, error)
        except BaseException:  # our bug, or a panic of native code
            _LOG.exception("request %r could not be answered", arrival.request_id)
            self._metrics.count("jitney_thread_errors_total")
            self._end(arrival, InternalError("the request could not be answered"))
