"""One model instance: its engine, and the threads around it.

Owns the life of the engine, the responder, the sweeps and the flushing of metrics, each in a
:class:`~jitney.frontend.worker.Worker`. ``model.py`` calls :meth:`Service.accept` for
each request, from one thread, and :meth:`Service.close` once.

    accept ──▶ threads that encode ──Reply──▶ responder ──Submit, Finish, Cancel──▶ engine
                                                  ◀───────── StepReport ──────────

Whether a request finds a place in the queue is for the engine's scheduler to decide. The front has
one limit of its own, on the bytes of all open prompts, which is there to protect its memory.
"""

import itertools
import logging
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec

from jitney import stub_memory
from jitney.engine.grammar_check import NUM_PROCESSES, GrammarChecker
from jitney.engine.handle import EngineHandle
from jitney.errors import InternalError, InvalidArgumentError, JitneyError, UnavailableError
from jitney.frontend.channel import Channel
from jitney.frontend.fair_pool import FairPool
from jitney.frontend.metrics import ModelMetrics
from jitney.frontend.protocol import ClientRequest, ResponseWriter, parse_request
from jitney.frontend.replies import Arrival, ClientInputs, Reply
from jitney.frontend.responder import Responder
from jitney.frontend.spans import RequestSpans
from jitney.frontend.sweeper import Sweeper
from jitney.frontend.tasks import perform
from jitney.frontend.worker import Worker
from jitney.messages import Submit
from jitney.sampling_params import check_sampling_params
from jitney.text.completion import Completion
from jitney.text.grammar_process import CHECKER_MODULE, checker_first_line
from jitney.text.intake import (
    EncodedPrompt,
    check_prompt_size,
    deadline_of,
    encode_client_bytes,
    make_submit,
)
from jitney.text.logprobs import LogprobsEncoder
from jitney.text.tokenizer import Tokenizer
from jitney.tracing import Tracing

_LOG = logging.getLogger(__name__)

SHORT_PROMPT = 16_384
"""Most bytes, or ids, of a prompt that takes milliseconds to encode. Longer prompts have a thread
of their own, where they delay no short one."""
MAX_OPEN_BYTES = 1 << 30
"""Most bytes of all open requests together: their prompts and sampling parameters as they came, and
``REQUEST_BYTES`` for each request."""
REQUEST_BYTES = 16_384
"""What a request takes in the front beside these."""
CPU_SEND_SHARE = 0.2
"""Default of option ``send_share`` on a CPU, where a response costs the engine's cores as much as a
token or two. Elsewhere it is 1."""
FLUSH_SHARE = 0.01
"""Share of the time that updates of counters and histograms may take: each changed value goes
through the queue that responses take too. There are two exceptions. Gauges are sent in every flush:
they are few, and a stop of the server looks at them. And while no request is open, every flush
sends all metrics."""
_JOIN_S = 5.0
"""Seconds for which :meth:`Service.close` waits for each thread."""
_SHUTTING_DOWN = "the server is shutting down"


class Service:
    """Accepts requests until it is drained or closed, or until its engine's supervisor fails. An
    engine that dies does not end it: the supervisor starts another one."""

    def __init__(
        self,
        engine: EngineHandle,
        tokenizer: Tokenizer,
        labels: Mapping[str, str],
        tracing: Tracing | None = None,
    ) -> None:
        """``labels`` go on every metric."""
        config = engine.config
        info = engine.info
        self._engine = engine
        self._config = config
        self._info = info
        self._tokenizer = tokenizer
        self._tracing = tracing
        self._keys = itertools.count()
        self._final_refusal: str | None = None  # why no request is ever accepted again
        self._is_draining = False  # no request is accepted now
        # Ends what is still open when the drain's time is over.
        self._drain_timer: threading.Timer | None = None
        # The bytes of the open requests are this number minus the responder's ``ended_bytes``. Both
        # only grow: this one is written by the server's thread alone, that one by the responder's
        # alone.
        self._accepted_bytes = 0
        self._ignored: set[str] = set()  # parameters of which the log says that they are ignored
        self._logprobs = LogprobsEncoder(tokenizer)
        self._short = ThreadPoolExecutor(2, "jitney-encode")
        self._long = ThreadPoolExecutor(1, "jitney-encode-long")
        # The check of a new grammar can take seconds. In these threads it delays only requests that
        # have a new grammar too, and those of others by one check at most.
        self._new_grammars = FairPool(NUM_PROCESSES, "jitney-encode-grammar")
        # A process that checks grammars reads this line before any other.
        first_line = checker_first_line(tokenizer.data, info, config)
        self._grammars = GrammarChecker(config, CHECKER_MODULE, first_line)
        self._tier_names = [tier.name for tier in config.tiers]
        drafter = None if config.speculation is None else config.speculation.drafter
        self._metrics = ModelMetrics(
            labels,
            info,
            tiers=self._tier_names,
            drafter=drafter,
            max_queued=config.max_queued,
        )
        self._responder = self._make_responder(labels["model"])
        self._all_metrics_due = 0.0  # monotonic seconds
        self._sweeper = Sweeper(self._responder, shortest_period_s=config.cancel_sweep_s)
        self._workers = self._start_workers()

    def _make_responder(self, model: str) -> Responder:
        spans = None
        if self._tracing is not None:
            spans = RequestSpans(self._tracing, model, self._engine.health)
        default_share = CPU_SEND_SHARE if self._info.device == "cpu" else 1.0
        return Responder(
            tell_engine=self._engine.send,
            metrics=self._metrics,
            max_pending_tokens=self._config.max_pending_tokens,
            send_share=self._config.send_share or default_share,
            spans=spans,
        )

    def _start_workers(self) -> dict[str, Worker]:
        turns: dict[str, Callable[[], float | None]] = {
            "engine": self._run_engine,
            "responder": self._responder.turn,
            "sweeper": self._sweeper.turn,
            "metrics": self._flush_metrics,
        }
        return {name: Worker(name, turn, self.count_error) for name, turn in turns.items()}

    def count_error(self) -> None:
        """Count an exception in a thread of the front."""
        self._metrics.count("jitney_thread_errors_total")

    # ------------------------------------------------------------------ the server's thread

    def accept(self, request: Any) -> None:
        """Take over one of the server's requests. If it is refused, its client is told at once.
        Never raises, because that would end all requests that the server has handed over with this
        one."""
        now = time.monotonic()
        channel = Channel(request.get_response_sender())
        try:
            refusal = self._why_refused()
            if refusal is not None:
                raise UnavailableError(refusal)
            self._take_over(parse_request(request), channel, now)
        except Exception as error:
            self._refuse(channel, self._as_refusal(error))

    def _refuse(self, channel: Channel, refusal: JitneyError) -> None:
        """End a request that was not taken over."""
        self._metrics.count_failed(refusal)
        if stub_memory.has_room():
            channel.fail(refusal)
        else:
            self._responder.refuse(channel, refusal)

    def _as_refusal(self, error: BaseException) -> JitneyError:
        """The error that a client gets, which holds nothing of the request. Our own errors are made
        for clients. Any other error is a bug: it is logged, and the client learns nothing of it."""
        if isinstance(error, JitneyError):
            return error.detached()
        _LOG.error("a request could not be taken in", exc_info=error)
        self.count_error()
        return InternalError("the request could not be taken in")

    def _take_over(self, request: ClientRequest, channel: Channel, now: float) -> None:
        """Check all that can be checked before the prompt is encoded, then have it encoded. Raises
        the reason for a refusal. From ``responder.add`` on it raises nothing, because the responder
        alone ends the request then."""
        self._warn_of_ignored(request.ignored)
        params = request.limits.apply(request.params, self._config)
        request = replace(request, params=params)
        check_sampling_params(params, self._config, vocab_size=self._info.vocab_size)
        self._check_size(request)
        size = request.num_bytes + REQUEST_BYTES
        self._check_open_bytes(size)
        run_in_encoder = self._encoder_for(request)
        tier = None
        if self._tier_names:
            index = self._config.tier_of(params.tier)
            tier = self._tier_names[index]
        arrival = Arrival(
            key=next(self._keys),
            channel=channel,
            at=now,
            deadline=deadline_of(params, now),
            size=size,
            request_id=request.request_id,
            trace=request.trace,
            tier=tier,
            inputs=ClientInputs(request),
        )
        self._accepted_bytes += size
        self._responder.add(arrival)
        self._sweeper.watched.put(arrival)
        refusal = self._why_refused()
        if refusal is not None:
            # A drain has begun meanwhile. It may have ended all open requests before this one was
            # added.
            self._responder.abort(arrival.key, UnavailableError(refusal))
            return
        try:
            run_in_encoder(partial(self._encode, arrival))
        except RuntimeError:  # the pool was shut down by close(), or no thread can be started
            reason = self._why_refused() or "the prompt cannot be encoded now"
            self._responder.abort(arrival.key, UnavailableError(reason))

    def _warn_of_ignored(self, names: Sequence[str]) -> None:
        """Say in the log that these parameters are ignored: once for each."""
        for name in names:
            if name not in self._ignored:
                self._ignored.add(name)
                _LOG.warning(
                    "the request parameter %s is the server's own and changes nothing here: "
                    "jitney's parameters stand in sampling_parameters (said once)",
                    name,
                )

    def _check_size(self, request: ClientRequest) -> None:
        """Raise InvalidArgumentError if the number of a prompt's bytes, or ids, shows already that
        it is too long."""
        size = len(request.prompt)
        if isinstance(request.prompt, bytes):
            check_prompt_size(request.prompt_input, size, self._config, self._info)
        elif size > self._info.max_model_len:
            raise InvalidArgumentError(
                f"input_ids has {size:,} ids, but the model's context holds "
                f"{self._info.max_model_len:,}"
            )

    def _check_open_bytes(self, size: int) -> None:
        """Raise UnavailableError if the open requests and another one of ``size`` bytes are more
        than the front's memory is meant for."""
        open_bytes = self._accepted_bytes - self._responder.ended_bytes
        if open_bytes + size > MAX_OPEN_BYTES:
            raise UnavailableError(
                f"all open requests have {open_bytes:,} bytes, and at most {MAX_OPEN_BYTES:,} may "
                "be open"
            )

    def _encoder_for(self, request: ClientRequest) -> Callable[[Callable[[], None]], object]:
        """The ``submit`` of the pool whose threads are to encode this request. Slow requests have
        pools of their own, so that they delay no quick one."""
        params = request.params
        structured = params.structured_outputs
        if structured is not None and not self._grammars.knows(structured):
            # Requests of one salt are of one tenant, as far as the engine knows.
            return partial(self._new_grammars.submit, params.cache_salt or "")
        if len(request.prompt) > SHORT_PROMPT:
            return self._long.submit
        return self._short.submit

    # ------------------------------------------------------------------ threads that encode

    def _encode(self, arrival: Arrival) -> None:
        request = arrival.inputs.take()
        if request is None:
            return  # its client has gone, or its deadline has passed
        try:
            if request.task == "generate":
                prompt = self._encode_prompt(request)
                submit = self._make_submit(request, arrival, prompt.ids)
                self._metrics.count("jitney_prompt_tokens_total", len(prompt.ids))
                reply = self._make_reply(request, arrival, prompt, submit)
                self._responder.begin(reply, submit)
            else:
                answer = perform(request, self._tokenizer, self._config, self._info)
                self._responder.answer(arrival, answer)
        except BaseException as error:  # a panic of native code is no Exception
            self._responder.abort(arrival.key, self._as_refusal(error))

    def _make_reply(
        self, request: ClientRequest, arrival: Arrival, prompt: EncodedPrompt, submit: Submit
    ) -> Reply:
        """What the responder keeps of a request."""
        echo_text = ""
        if request.echo:
            echo_text = prompt.text or self._tokenizer.decode(prompt.ids)
        writer = ResponseWriter(
            request,
            echo_text=echo_text,
            num_prompt=len(prompt.ids),
            encoder=self._logprobs,
        )
        # The client's own parameters are looked at, not ``submit.params``: for the cumulative sum,
        # ``_make_submit`` asks the engine for logprobs that the client does not want.
        wants_logprobs = "logprobs" in request.returns and request.params.logprobs is not None
        encoder = self._logprobs if wants_logprobs else None
        completion = Completion(submit, self._tokenizer, encoder)
        return Reply(arrival, streamed=request.stream, completion=completion, writer=writer)

    def _encode_prompt(self, request: ClientRequest) -> EncodedPrompt:
        if not isinstance(request.prompt, bytes):
            return EncodedPrompt(request.prompt.tolist(), text=None)
        return encode_client_bytes(
            field=request.prompt_input,
            data=request.prompt,
            tokenizer=self._tokenizer,
            config=self._config,
            info=self._info,
        )

    def _make_submit(self, request: ClientRequest, arrival: Arrival, ids: list[int]) -> Submit:
        params = request.params
        if "cumulative_logprob" in request.returns and params.logprobs is None:
            # It is the sum of the chosen tokens' logprobs, so the engine must return those.
            params = msgspec.structs.replace(params, logprobs=0)
        return make_submit(
            key=arrival.key,
            prompt_ids=ids,
            params=params,
            tokenizer=self._tokenizer,
            info=self._info,
            config=self._config,
            now=arrival.at,
            check_grammar=self._grammars.check,
            stream=request.stream,
            request_id=request.request_id,
        )

    # ------------------------------------------------------------------ life

    @property
    def is_ready(self) -> bool:
        """Whether requests are taken, and there is an engine for them."""
        return self._why_refused() is None and self._engine.health.up

    def _why_refused(self) -> str | None:
        """Why no request is accepted now. None: requests are accepted."""
        if self._final_refusal is not None:
            return self._final_refusal
        return _SHUTTING_DOWN if self._is_draining else None

    def drain(self, grace_s: float) -> None:
        """Refuse new requests from now on. What is still open after ``grace_s`` seconds is ended;
        if ``grace_s`` is infinite, nothing is. A later call replaces the time of the one before.
        Calls must not overlap."""
        self._is_draining = True
        if self._drain_timer is not None:
            self._drain_timer.cancel()
        self._drain_timer = None
        if math.isfinite(grace_s):
            error = UnavailableError(_SHUTTING_DOWN)
            self._drain_timer = threading.Timer(grace_s, self._responder.abort_all, (error,))
            self._drain_timer.daemon = True
            self._drain_timer.start()

    def reopen(self) -> None:
        """Serve new requests again after a drain, unless they are refused for another reason. Must
        not overlap with :meth:`drain`."""
        if self._drain_timer is not None:
            self._drain_timer.cancel()
        self._is_draining = False

    def close(self) -> None:
        """End every thread, in bounded time. Requests that are still open end with an error."""
        self._final_refusal = "the model is being unloaded"
        for encoders in (self._short, self._long):
            encoders.shutdown(wait=False, cancel_futures=True)
        self._new_grammars.shutdown()
        self._grammars.close()
        # The engine ends before the responder: what finishes in its last report is answered.
        self._engine.stop()
        self._workers["engine"].join(_JOIN_S)
        self._responder.stop()
        self._workers["responder"].join(_JOIN_S)
        for name in ("sweeper", "metrics"):
            self._workers[name].stop()
            self._workers[name].join(_JOIN_S)
        self._metrics.close()
        if self._tracing is not None:
            self._tracing.close()

    # ------------------------------------------------------------------ turns of the threads

    def _run_engine(self) -> None:
        try:
            self._engine.run(self._responder)
        except BaseException:  # the supervisor has failed: there will be no other engine
            _LOG.exception("the engine has died")
            self._final_refusal = "the engine has stopped; the model must be loaded again"
            self._responder.abort_all(InternalError("the engine has stopped"))

    def _flush_metrics(self) -> float:
        if not stub_memory.has_room():
            # The server would take none of it, and responses need what memory is left. A later turn
            # sends it.
            return self._config.metrics_flush_s
        counts = self._responder.counts
        self._metrics.set_gauges(self._engine.health, counts)
        began = time.monotonic()
        # While nothing is open, all metrics are sent each time: a benchmark reads the counters
        # before its first request and after its last one, and must not find old values.
        is_idle = not counts.encoding and not counts.submitted
        if is_idle or began >= self._all_metrics_due:
            self._metrics.flush()
            seconds = time.monotonic() - began
            self._all_metrics_due = began + seconds / FLUSH_SHARE
        else:
            self._metrics.flush(only_gauges=True)
        return self._config.metrics_flush_s
