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
import queue
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec

from jitney.engine.grammar_check import GrammarChecker
from jitney.engine.handle import EngineHandle
from jitney.errors import InternalError, InvalidArgumentError, JitneyError, UnavailableError
from jitney.frontend.channel import Arrival, Channel, sweep
from jitney.frontend.metrics import ModelMetrics
from jitney.frontend.protocol import ClientRequest, ResponseWriter, parse_request
from jitney.frontend.responder import Reply, Responder
from jitney.frontend.spans import RequestSpans
from jitney.frontend.tasks import perform
from jitney.frontend.worker import Worker
from jitney.messages import Submit
from jitney.sampling_params import check_sampling_params
from jitney.text.completion import Completion
from jitney.text.grammar_process import CHECKER, setup
from jitney.text.intake import check_prompt_size, deadline_of, encode_input, make_submit
from jitney.text.logprobs import LogprobsEncoder
from jitney.text.tokenizer import Tokenizer
from jitney.tracing import Tracing

_LOG = logging.getLogger(__name__)

SHORT_PROMPT = 16_384
"""Bytes, or ids, of a prompt that takes milliseconds to encode. Longer ones have a thread of their
own, so that they delay one another alone."""
MAX_OPEN_BYTES = 1 << 30
"""Of the prompts of all open requests, as they came."""
REQUEST_BYTES = 16_384
"""What a request takes in the front beside its prompt; counted like bytes of the prompt."""
CPU_SEND_SHARE = 0.2
"""Default of option ``send_share`` on a CPU, where a response costs the engine's cores as much as a
token or two. Elsewhere it is 1."""
_SWEEP_SHARE = 0.25
"""Largest share of the time for asking the server which clients have gone. Questions and responses
go through one queue to the server, so with very many requests there are fewer sweeps."""
_JOIN_S = 5.0
"""Seconds for which :meth:`Service.close` waits for each thread."""


class Service:
    """Accepts requests until closed or until its engine dies."""

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
        self._closed: str | None = None  # why no request is accepted any more
        # Bytes of all requests that were ever accepted. Those that are open now: this less
        # Responder.ended_bytes. So each of the two counts has one thread that writes it.
        self._accepted_bytes = 0
        self._logprobs = LogprobsEncoder(tokenizer.token_text)
        self._short = ThreadPoolExecutor(2, "jitney-encode")
        self._long = ThreadPoolExecutor(1, "jitney-encode-long")
        # One grammar's check can take seconds: it holds up other new grammars alone.
        self._new_grammars = ThreadPoolExecutor(1, "jitney-encode-grammar")
        first_line = setup(tokenizer.data, info, config)
        self._grammars = GrammarChecker(config, CHECKER, first_line)
        self._tier_names = [tier.name for tier in config.tiers]
        drafter = "" if config.speculation is None else config.speculation.drafter
        self._metrics = ModelMetrics(labels, info, tiers=self._tier_names, drafter=drafter)
        self._responder = self._make_responder(labels["model"])
        # Called with what Responder.abort takes, from any thread.
        self._abort = partial(self._responder.post, self._responder.abort)
        self._watched: queue.SimpleQueue[tuple[int, Channel]] = queue.SimpleQueue()
        self._workers = self._start_workers()

    def _make_responder(self, model: str) -> Responder:
        spans = None
        if self._tracing is not None:
            spans = RequestSpans(self._tracing, model, self._engine.health)
        share = CPU_SEND_SHARE if self._info.device == "cpu" else 1.0
        return Responder(
            send_message=self._engine.send,
            metrics=self._metrics,
            max_pending_tokens=self._config.max_pending_tokens,
            send_share=self._config.send_share or share,
            spans=spans,
        )

    def _start_workers(self) -> dict[str, Worker]:
        """In the order in which they are to end."""
        turns: dict[str, Callable[[], float | None]] = {
            "engine": self._run_engine,
            "responder": self._responder.turn,
            "sweeper": self._sweep,
            "metrics": self._flush_metrics,
        }
        return {name: Worker(name, turn, self.count_error) for name, turn in turns.items()}

    def count_error(self) -> None:
        """To be called where a thread of the front has failed."""
        self._metrics.count("jitney_thread_errors_total")

    # ------------------------------------------------------------------ the server's thread

    def accept(self, request: Any) -> None:
        """Take over one of the server's requests. A refusal is sent at once; never raises, because
        that would end every request of the same call."""
        now = time.monotonic()
        channel = Channel(request.get_response_sender())
        try:
            if self._closed is not None:
                raise UnavailableError(self._closed)
            self._admit(parse_request(request), channel, now)
        except Exception as error:
            refusal = self._as_refusal(error)
            self._metrics.failed(refusal)
            channel.fail(refusal)

    def _as_refusal(self, error: Exception) -> JitneyError:
        """What a client is told of ``error``: all of one that was raised on purpose."""
        if isinstance(error, JitneyError):
            return error
        _LOG.error("a request could not be taken in", exc_info=error)
        self.count_error()
        return InternalError("the request could not be taken in")

    def _admit(self, request: ClientRequest, channel: Channel, now: float) -> None:
        """Refuse what can be refused without encoding the prompt; else have it encoded."""
        params = request.limits.apply(request.params, self._config)
        request = replace(request, params=params)
        check_sampling_params(params, self._config, vocab_size=self._info.vocab_size)
        self._check_size(request)
        size = request.prompt_bytes + REQUEST_BYTES
        self._check_open_bytes(size)
        tier = ""
        if self._tier_names:
            tier = self._tier_names[self._config.tier_of(params.tier)]
        arrival = Arrival(
            key=next(self._keys),
            channel=channel,
            at=now,
            deadline=deadline_of(params, now),
            size=size,
            request_id=request.request_id,
            trace=request.trace,
            tier=tier,
        )
        self._accepted_bytes += size
        self._responder.post(self._responder.add, arrival)
        self._watched.put((arrival.key, channel))
        self._encoders_for(request).submit(self._encode, request, arrival)

    def _check_size(self, request: ClientRequest) -> None:
        """Raise InvalidArgumentError for a prompt that is too long whatever its encoding gives."""
        size = len(request.prompt)
        if isinstance(request.prompt, bytes):
            check_prompt_size(request.prompt_input, size, self._config, self._info)
            return
        most = self._info.max_model_len
        if size > most:
            raise InvalidArgumentError(
                f"input_ids has {size:,} ids, but the model's context holds {most:,}"
            )

    def _check_open_bytes(self, size: int) -> None:
        """Raise UnavailableError if this is more than the front's memory is meant for."""
        open_bytes = self._accepted_bytes - self._responder.ended_bytes
        if open_bytes + size > MAX_OPEN_BYTES:
            raise UnavailableError(
                f"the prompts of all open requests have {open_bytes:,} bytes, and at most "
                f"{MAX_OPEN_BYTES:,} may be open"
            )

    def _encoders_for(self, request: ClientRequest) -> ThreadPoolExecutor:
        """The threads that encode this request: slow ones delay only their like."""
        structured = request.params.structured_outputs
        if structured is not None and not self._grammars.knows(structured):
            return self._new_grammars
        if len(request.prompt) > SHORT_PROMPT:
            return self._long
        return self._short

    # ------------------------------------------------------------------ threads that encode

    def _encode(self, request: ClientRequest, arrival: Arrival) -> None:
        try:
            if arrival.channel.closed:
                return  # it was cancelled, or its deadline has passed
            if request.task == "generate":
                reply, submit = self._make_reply(request, arrival)
                self._responder.post(self._responder.begin, reply, submit)
            else:
                answer = perform(request, self._tokenizer, self._config, self._info)
                self._responder.post(self._responder.answer, arrival, answer)
        except Exception as error:
            self._abort(self._as_refusal(error), arrival.key)

    def _make_reply(self, request: ClientRequest, arrival: Arrival) -> tuple[Reply, Submit]:
        """What the client gets, and what the engine gets. Raises InvalidArgumentError."""
        if isinstance(request.prompt, bytes):
            ids, text = encode_input(
                field=request.prompt_input,
                data=request.prompt,
                tokenizer=self._tokenizer,
                config=self._config,
                info=self._info,
            )
        else:
            ids = request.prompt.tolist()
            text = None
        params = request.params
        if "cumulative_logprob" in request.returns and params.logprobs is None:
            params = msgspec.structs.replace(params, logprobs=0)  # the chosen token's is needed
        submit = make_submit(
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
        self._metrics.count("jitney_prompt_tokens_total", len(ids))
        echo = ""
        if request.echo:
            echo = self._tokenizer.decode(ids) if text is None else text
        writer = ResponseWriter(
            request, echo_text=echo, prompt_tokens=len(ids), encoder=self._logprobs
        )
        wants_logprobs = "logprobs" in request.returns and request.params.logprobs is not None
        encoder = self._logprobs if wants_logprobs else None
        completion = Completion(submit, self._tokenizer, encoder)
        reply = Reply(arrival, streamed=request.stream, completion=completion, writer=writer)
        return reply, submit

    # ------------------------------------------------------------------ life

    @property
    def is_ready(self) -> bool:
        """Whether requests are taken, and there is an engine for them."""
        return self._closed is None and self._engine.health.up

    def drain(self, grace_s: float) -> None:
        """Refuse new requests from now on, and end what still runs in ``grace_s`` seconds."""
        self._closed = "the server is shutting down"
        timer = threading.Timer(grace_s, self._abort, (UnavailableError(self._closed),))
        timer.daemon = True
        timer.start()

    def close(self) -> None:
        """End every thread in bounded time. Requests that are still open end with an error."""
        self._closed = "the model is being unloaded"
        for encoders in (self._short, self._long, self._new_grammars):
            encoders.shutdown(wait=False, cancel_futures=True)
        self._grammars.close()
        # In this order: the engine's last report is still answered.
        self._engine.stop()
        self._workers["engine"].join(_JOIN_S)
        self._responder.post(self._responder.stop)
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
        except BaseException:
            _LOG.exception("the engine has died")
            self._closed = "the engine has stopped; the model must be loaded again"
            self._abort(InternalError("the engine has stopped"))

    def _sweep(self) -> float:
        """Find the requests whose clients have gone, queued ones included, and those whose deadline
        passes while their prompt is encoded. In a thread of its own, because each question is a
        round trip to the server."""
        if self._responder.counts.encoding:
            self._responder.post(self._responder.expire)
        began = time.monotonic()
        for key in sweep(self._watched):
            self._responder.post(self._responder.cancel, key)
        took = time.monotonic() - began
        least_pause = took / _SWEEP_SHARE - took
        return max(self._config.cancel_sweep_s - took, least_pause)

    def _flush_metrics(self) -> float:
        self._metrics.note(self._engine.health, self._responder.counts)
        self._metrics.flush()
        return self._config.metrics_flush_s
