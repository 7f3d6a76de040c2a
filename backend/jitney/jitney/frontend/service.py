"""One model instance at work: the engine in its thread and the threads around it.

Owns the life of the engine, the responder, the sweeper and the flushing of metrics; all threads are
daemons, so that none can hold up the server's exit. ``model.py`` calls :meth:`Service.accept` for
each request, from one thread, and :meth:`Service.close` once.

    accept ──Opened──▶ responder ◀──StepReport── engine ◀──Submit, Finish, Cancel── all of them
"""

import itertools
import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import msgspec

from jitney.completion import Completion
from jitney.config import EngineConfig
from jitney.engine import Outbox
from jitney.errors import InternalError, InvalidArgumentError, JitneyError, UnavailableError
from jitney.frontend.channel import Channel
from jitney.frontend.metrics import Metrics
from jitney.frontend.protocol import ClientRequest, ResponseWriter, parse_request
from jitney.frontend.responder import Opened, Responder, outcome_of
from jitney.frontend.sweeper import Sweeper
from jitney.intake import decode_prompt_text, encode_messages, encode_prompt, make_submit
from jitney.request import Message, ModelInfo
from jitney.sampling_params import check_token_ids
from jitney.tokenizer import Tokenizer

_LOG = logging.getLogger(__name__)

_JOIN_S = 5.0
"""How long :meth:`Service.close` waits for each thread; a step that takes longer is abandoned."""


class EngineLike(Protocol):
    """What the service asks of an engine; the tests have an arithmetic one."""

    def send(self, message: Message) -> None:
        """Queue a message; never blocks. UnavailableError for a Submit once it stops."""

    def run(self, outbox: Outbox) -> None:
        """Step until stopped, putting each report into ``outbox``; on return all is ended."""

    def stop(self) -> None:
        """Make :meth:`run` return after the current step."""


class Service:
    """Accepts requests until closed or until its engine dies."""

    def __init__(
        self,
        engine: EngineLike,
        tokenizer: Tokenizer,
        info: ModelInfo,
        config: EngineConfig,
        labels: Mapping[str, str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._info = info
        self._config = config
        self._clock = clock
        self._keys = itertools.count()
        self._closed: str | None = None  # why no request is accepted any more
        self._engine_failure: InternalError | None = None
        self._metrics = Metrics(labels, info)
        self._responder = Responder(
            engine.send, self._metrics, config.max_pending_tokens, config.send_share, clock
        )
        self._sweeper = Sweeper(engine.send, config.cancel_sweep_s)
        self._stopped = threading.Event()
        bodies = {
            "engine": self._run_engine,
            "responder": self._responder.run,
            "sweeper": self._sweeper.run,
            "metrics": self._run_metrics,
        }
        self._threads = [
            threading.Thread(target=body, name=f"jitney-{name}", daemon=True)
            for name, body in bodies.items()
        ]
        for thread in self._threads:
            thread.start()

    # ------------------------------------------------------------------ the server's thread

    def accept(self, request: Any) -> None:
        """Take over one of the server's requests. Answers at once if it is refused; never raises,
        because that would end every request of the same call."""
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
            now=self._clock(),
        )
        writer = ResponseWriter(
            request,
            echo_text=text if request.echo else "",
            num_input_tokens=len(ids),
            token_text=self._tokenizer.token_text,
        )
        completion = Completion(submit, self._tokenizer)
        opened = Opened(key, channel, request.stream, completion, writer, submit.arrival)
        self._metrics.count("jitney_prompt_tokens_total", len(ids))
        self._responder.open(opened)  # before the engine has it: its events find it there
        try:
            self._engine.send(submit)
        except UnavailableError as error:
            self._responder.abort(error, key)
            return
        self._sweeper.watch(key, channel)
        if self._engine_failure is not None:  # it died in between, and may not have seen this one
            self._responder.abort(self._engine_failure, key)

    def _encode(self, request: ClientRequest) -> tuple[list[int], str]:
        """The prompt's ids, and its text if the output is to begin with it."""
        tokenizer, config, info = self._tokenizer, self._config, self._info
        if isinstance(request.prompt, bytes):
            text = decode_prompt_text(request.prompt, config, info, request.prompt_input)
            if request.prompt_input == "text_input":
                return encode_prompt(text, tokenizer, config, info), text
            ids = encode_messages(text, tokenizer, config, info)
        elif request.prompt.size > info.max_model_len:  # judged before it becomes a list
            raise InvalidArgumentError(
                f"input_ids has {request.prompt.size:,} ids, but the model's context holds "
                f"{info.max_model_len:,}"
            )
        else:
            ids = request.prompt.tolist()
            check_token_ids("input_ids", ids, info.vocab_size)
        return ids, tokenizer.decode(ids) if request.echo else ""

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
        """End every thread in bounded time. What is still in flight is ended with an error."""
        self._closed = "the model is being unloaded"
        ends = (self._engine.stop, self._responder.stop, self._sweeper.stop, self._stopped.set)
        for thread, end in zip(self._threads, ends, strict=True):
            end()
            thread.join(_JOIN_S)  # in this order: the engine's last report is still answered
            if thread.is_alive():
                _LOG.warning("%s did not end within %g s", thread.name, _JOIN_S)
        self._metrics.close()

    # ------------------------------------------------------------------ bodies of the threads

    def _run_engine(self) -> None:
        try:
            self._engine.run(self._responder)
        except BaseException:
            _LOG.exception("the engine has died")
            self._engine_failure = InternalError("the engine has stopped")
            self._closed = "the engine has stopped; the model must be loaded again"
            self._responder.abort(self._engine_failure)

    def _run_metrics(self) -> None:
        while not self._stopped.wait(self._config.metrics_flush_s):
            self._metrics.flush()
