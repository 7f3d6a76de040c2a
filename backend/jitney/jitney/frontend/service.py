"""One model instance: the engine in its thread and the threads around it.

Owns the life of the engine, the responder, the sweeper and the flushing of metrics, each in a
:class:`~jitney.frontend.worker.Worker`. ``model.py`` calls :meth:`Service.accept` for
each request, from one thread, and :meth:`Service.close` once.

    accept ──Reply──▶ responder ◀──StepReport── engine ◀──Submit, Finish, Cancel── all of them
"""

import itertools
import logging
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import msgspec

from jitney.engine.engine import Engine
from jitney.errors import InternalError, InvalidArgumentError, JitneyError, UnavailableError
from jitney.frontend.channel import Channel
from jitney.frontend.metrics import Metrics
from jitney.frontend.protocol import ClientRequest, ResponseWriter, parse_request
from jitney.frontend.responder import Reply, Responder, outcome_of
from jitney.frontend.sweeper import Sweeper
from jitney.frontend.worker import Worker
from jitney.text.chat import parse_chat
from jitney.text.completion import Completion
from jitney.text.intake import decode_prompt_text, encode_chat, encode_prompt, make_submit
from jitney.text.tokenizer import Tokenizer

_LOG = logging.getLogger(__name__)

_JOIN_S = 5.0
"""Seconds for which :meth:`Service.close` waits for each thread."""


class Service:
    """Accepts requests until closed or until its engine dies."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        labels: Mapping[str, str],
    ) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._info = info = engine.runner.info
        self._config = config = engine.config
        self._keys = itertools.count()
        self._closed: str | None = None  # why no request is accepted any more
        self._engine_failure: InternalError | None = None
        self._metrics = Metrics(labels, info)
        # On a CPU a response costs the engine's cores as much as a token or two.
        send_share = config.send_share or (0.2 if info.device == "cpu" else 1.0)
        self._responder = Responder(
            engine.send, self._metrics, config.max_pending_tokens, send_share
        )
        self._sweeper = Sweeper(engine.send, config.cancel_sweep_s)
        turns: dict[str, Callable[[], float | None]] = {
            "engine": self._run_engine,
            "responder": self._responder.turn,
            "sweeper": self._sweeper.turn,
            "metrics": self._flush_metrics,
        }
        count_error = partial(self._metrics.count, "jitney_thread_errors_total")
        self._workers = {name: Worker(name, turn, count_error) for name, turn in turns.items()}

    # ------------------------------------------------------------------ the server's thread

    def accept(self, request: Any) -> None:
        """Take over one of the server's requests. A refusal is sent at once; never raises, because
        that would end every request of the same call."""
        channel = Channel(request.get_response_sender())
        try:
            if self._closed is not None:
                raise UnavailableError(self._closed)
            self._submit(parse_request(request), channel)
        except JitneyError as error:
            self._refuse(channel, error)
        except Exception:
            _LOG.exception("a request could not be taken in")
            self._refuse(channel, InternalError("the request could not be taken in"))

    def _submit(self, request: ClientRequest, channel: Channel) -> None:
        ids, text = self._encode(request)
        params = request.params
        if "cumulative_logprob" in request.returns and params.logprobs is None:
            params = msgspec.structs.replace(params, logprobs=0)  # the chosen token's is needed
        key = next(self._keys)
        submit = make_submit(
            key=key,
            prompt_ids=ids,
            params=params,
            tokenizer=self._tokenizer,
            info=self._info,
            config=self._config,
            now=time.monotonic(),
        )
        if request.echo and text is None:
            text = self._tokenizer.decode(ids)
        writer = ResponseWriter(
            request,
            echo_text=text if request.echo and text else "",
            num_input_tokens=len(ids),
            token_text=self._tokenizer.token_text,
        )
        completion = Completion(submit, self._tokenizer)
        self._metrics.count("jitney_prompt_tokens_total", len(ids))
        # Before the engine has the request: its events find the reply there.
        self._responder.add(Reply(key, channel, request.stream, completion, writer, submit.arrival))
        try:
            self._engine.send(submit)
        except UnavailableError as error:
            self._responder.abort(error, key)
            return
        self._sweeper.watch(key, channel)
        if self._engine_failure is not None:  # it died meanwhile, perhaps without this one
            self._responder.abort(self._engine_failure, key)

    def _encode(self, request: ClientRequest) -> tuple[list[int], str | None]:
        """The prompt's ids; its text too, if it came as text."""
        tokenizer, config, info = self._tokenizer, self._config, self._info
        if isinstance(request.prompt, bytes):
            text = decode_prompt_text(request.prompt, config, info, request.prompt_input)
            if request.prompt_input == "text_input":
                return encode_prompt(text, tokenizer, config, info), text
            return encode_chat(parse_chat(text, config), tokenizer, config, info), None
        if request.prompt.size > info.max_model_len:  # refused before it becomes a list
            raise InvalidArgumentError(
                f"input_ids has {request.prompt.size:,} ids, but the model's context holds "
                f"{info.max_model_len:,}"
            )
        return request.prompt.tolist(), None

    def _refuse(self, channel: Channel, error: JitneyError) -> None:
        self._metrics.outcome(outcome_of(error))
        channel.fail(error)

    # ------------------------------------------------------------------ life

    def drain(self, grace_s: float) -> None:
        """Refuse new requests from now on, and end what still runs in ``grace_s`` seconds."""
        self._closed = "the server is shutting down"
        timer = threading.Timer(grace_s, self._responder.abort, (UnavailableError(self._closed),))
        timer.daemon = True
        timer.start()

    def close(self) -> None:
        """End every thread in bounded time. Requests that are still open end with an error."""
        self._closed = "the model is being unloaded"
        ends = {"engine": self._engine.stop, "responder": self._responder.stop}
        for name, worker in self._workers.items():
            ends.get(name, worker.stop)()
            worker.join(_JOIN_S)  # in this order: the engine's last report is still answered
        self._metrics.close()

    # ------------------------------------------------------------------ turns of the threads

    def _run_engine(self) -> None:
        try:
            self._engine.run(self._responder)
        except BaseException:
            _LOG.exception("the engine has died")
            self._engine_failure = InternalError("the engine has stopped")
            self._closed = "the engine has stopped; the model must be loaded again"
            self._responder.abort(self._engine_failure)

    def _flush_metrics(self) -> float:
        self._metrics.flush()
        return self._config.metrics_flush_s
