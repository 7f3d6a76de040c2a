"""One model instance: its engine, and the threads around it.

Owns the life of the engine, the responder, the sweeps and the flushing of metrics, each in a
:class:`~jitney.frontend.worker.Worker`. ``model.py`` calls :meth:`Service.accept` for
each request, from one thread, and :meth:`Service.close` once.

    accept ──▶ threads that encode ──Reply──▶ responder ──Submit, Finish, Cancel──▶ engine
                                                  ◀───────── StepReport ──────────
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
from jitney.frontend.metrics import Metrics
from jitney.frontend.protocol import ClientRequest, ResponseWriter, parse_request
from jitney.frontend.responder import Reply, Responder
from jitney.frontend.spans import RequestSpans
from jitney.frontend.tasks import perform
from jitney.frontend.worker import Worker
from jitney.messages import Submit
from jitney.sampling_params import check_sampling_params
from jitney.text.completion import Completion
from jitney.text.grammar_process import setup
from jitney.text.intake import check_prompt_size, encode_input, make_submit
from jitney.text.logprobs import LogprobsEncoder
from jitney.text.tokenizer import Tokenizer
from jitney.tracing import Tracing

_LOG = logging.getLogger(__name__)

SHORT_PROMPT = 16_384
"""Bytes, or ids, of a prompt that takes milliseconds to encode. Longer ones have a thread of their
own, so that they delay one another alone."""
_LARGEST_SHARE = 0.25
"""Questions and responses share one queue to the server: with very many requests there are fewer
sweeps, so that the questions take at most this share of the time."""
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
        self._engine = engine
        self._tokenizer = tokenizer
        self._info = info = engine.info
        self._config = config = engine.config
        self._keys = itertools.count()
        self._closed: str | None = None  # why no request is accepted any more
        self._logprobs = LogprobsEncoder(tokenizer.token_text)
        self._short = ThreadPoolExecutor(2, "jitney-encode")
        self._long = ThreadPoolExecutor(1, "jitney-encode-long")
        # One grammar's check can take seconds: it holds up other new grammars alone.
        self._new_grammars = ThreadPoolExecutor(1, "jitney-encode-grammar")
        self._grammars = GrammarChecker(config, setup(tokenizer.data, info, config))
        self._counting = threading.Lock()
        # By tier: requests whose prompt is not encoded yet; changed under the lock.
        self._encoding = [0] * max(len(config.tiers), 1)
        drafter = "" if config.speculation is None else config.speculation.drafter
        self._metrics = Metrics(labels, info, [one.name for one in config.tiers], drafter)
        # On a CPU a response costs the engine's cores as much as a token or two.
        send_share = config.send_share or (0.2 if info.device == "cpu" else 1.0)
        self._tracing = tracing
        spans = None if tracing is None else RequestSpans(tracing, labels["model"], engine.health)
        self._responder = Responder(
            engine.send, self._metrics, config.max_pending_tokens, send_share, spans
        )
        self._abort = partial(self._responder.post, self._responder.abort)
        self._watched: queue.SimpleQueue[tuple[int, Channel]] = queue.SimpleQueue()
        turns: dict[str, Callable[[], float | None]] = {
            "engine": self._run_engine,
            "responder": self._responder.turn,
            "sweeper": self._sweep,
            "metrics": self._flush_metrics,
        }
        self.count_error = partial(self._metrics.count, "jitney_thread_errors_total")
        """To be called where a thread of the front has failed."""
        self._workers = {name: Worker(name, turn, self.count_error) for name, turn in turns.items()}

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
            said = self._shown(error)
            self._metrics.failed(said)
            channel.fail(said)

    def _shown(self, error: Exception) -> JitneyError:
        """What a client is told of ``error``: all of one that was raised on purpose."""
        if isinstance(error, JitneyError):
            return error
        _LOG.error("a request could not be taken in", exc_info=error)
        self.count_error()
        return InternalError("the request could not be taken in")

    def _admit(self, request: ClientRequest, channel: Channel, now: float) -> None:
        """Refuse what can be refused without encoding the prompt; else have it encoded."""
        request = replace(request, params=request.limits.apply(request.params, self._config))
        info, params, size = self._info, request.params, len(request.prompt)
        check_sampling_params(params, self._config, vocab_size=info.vocab_size)
        if isinstance(request.prompt, bytes):
            check_prompt_size(request.prompt_input, size, self._config, info)
        elif size > info.max_model_len:
            raise InvalidArgumentError(
                f"input_ids has {size:,} ids, but the model's context holds {info.max_model_len:,}"
            )
        stats, tiers = self._metrics.stats, self._config.tiers
        tier = self._config.tier_of(params.tier)
        # As in the scheduler: lower tiers do not count.
        waiting = sum(one.waiting for one in stats.tiers[: tier + 1]) if tiers else stats.waiting
        free = 0 if waiting else max(self._config.max_num_seqs - stats.running, 0)
        waiting += sum(self._encoding[: tier + 1])
        if waiting >= self._config.max_queued + free:
            raise UnavailableError.of_queue(waiting, self._config.max_queued)
        deadline = None if params.deadline_ms is None else now + params.deadline_ms / 1000
        name, trace = request.request_id, request.trace
        label = tiers[tier].name if tiers else ""
        arrival = Arrival(next(self._keys), channel, now, deadline, name, trace, label)
        self._responder.post(self._responder.add, arrival)
        self._watched.put((arrival.key, channel))
        with self._counting:
            self._encoding[tier] += 1
        lane = self._long if size > SHORT_PROMPT else self._short
        structured = params.structured_outputs
        if structured is not None and not self._grammars.knows(structured):
            lane = self._new_grammars
        lane.submit(self._encode, request, arrival, tier)

    # ------------------------------------------------------------------ threads that encode

    def _encode(self, request: ClientRequest, arrival: Arrival, tier: int) -> None:
        try:
            if arrival.channel.closed:
                return  # it was cancelled, or its deadline has passed
            if request.task == "generate":
                self._responder.post(self._responder.begin, *self._make_reply(request, arrival))
            else:
                made = perform(request, self._tokenizer, self._config, self._info)
                self._responder.post(self._responder.answer, arrival, made)
        except Exception as error:
            self._abort(self._shown(error), arrival.key)
        finally:
            with self._counting:
                self._encoding[tier] -= 1

    def _make_reply(self, request: ClientRequest, arrival: Arrival) -> tuple[Reply, Submit]:
        text = None
        if isinstance(request.prompt, bytes):
            ids, text = encode_input(
                request.prompt_input, request.prompt, self._tokenizer, self._config, self._info
            )
        else:
            ids = request.prompt.tolist()
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
        echo = (self._tokenizer.decode(ids) if text is None else text) if request.echo else ""
        writer = ResponseWriter(request, echo, len(ids), self._logprobs)
        self._metrics.count("jitney_prompt_tokens_total", len(ids))
        asked = "logprobs" in request.returns and request.params.logprobs is not None
        encoder = self._logprobs if asked else None
        completion = Completion(submit, self._tokenizer, encoder)
        return Reply(arrival, request.stream, completion, writer), submit

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
        for lane in (self._short, self._long, self._new_grammars):
            lane.shutdown(wait=False, cancel_futures=True)
        self._grammars.close()
        stop = partial(self._responder.post, self._responder.stop)
        ends: dict[str, Callable[[], None]] = {"engine": self._engine.stop, "responder": stop}
        for name, worker in self._workers.items():
            ends.get(name, worker.stop)()
            worker.join(_JOIN_S)  # in this order: the engine's last report is still answered
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
        if any(self._encoding):
            self._responder.post(self._responder.expire)
        began = time.monotonic()
        for key in sweep(self._watched):
            self._responder.post(self._responder.cancel, key)
        took = time.monotonic() - began
        return max(self._config.cancel_sweep_s - took, took * (1 / _LARGEST_SHARE - 1))

    def _flush_metrics(self) -> float:
        self._metrics.note(self._engine.health, *self._responder.counts)
        self._metrics.flush()
        return self._config.metrics_flush_s
