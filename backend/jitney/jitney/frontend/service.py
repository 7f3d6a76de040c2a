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

from jitney.completion import Completion
from jitney.config import EngineConfig
from jitney.errors import InternalError, JitneyError, UnavailableError
from jitney.frontend.channel import Channel
from jitney.frontend.metrics import Metrics
from jitney.frontend.protocol import ClientRequest, parse_request
from jitney.frontend.responder import Opened, Responder, outcome_of
from jitney.frontend.sweeper import Sweeper
from jitney.intake import decode_prompt_text, encode_messages, encode_prompt, make_submit
from jitney.request import Message, ModelInfo
from jitney.tokenizer import Tokenizer

_LOG = logging.getLogger(__name__)

_JOIN_S = 5.0
"""How long :meth:`Service.close` waits for each thread; a step that takes longer is abandoned."""


class EngineLike(Protocol):
    """What the service asks of an engine; the tests have an arithmetic one."""

    def send(self, message: Message) -> None:
        """Queue a message; never blocks."""

    def run(self, outbox: Any) -> None:
        """Step until stopped, putting each report into ``outbox``."""

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
        self._responder = Responder(engine.send, self._metrics, config.max_pending_tokens, clock)
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
        key = next(self._keys)
        submit = make_submit(
            key=key,
            prompt_ids=ids,
            params=request.params,
            tokenizer=self._tokenizer,
            info=self._info,
            config=self._config,
            now=self._clock(),
        )
        opened = Opened(
            key=key,
            channel=channel,
            request=request,
            completion=Completion(submit, self._tokenizer),
            echo_text=text if request.echo else "",
            num_input_tokens=len(ids),
        )
        self._metrics.count("jitney_prompt_tokens_total", len(ids))
        self._responder.open(opened)  # before the engine has it: its events find it there
        self._engine.send(submit)
        self._sweeper.watch(key, channel)
        if self._engine_failure is not None:  # it died in between, and may not have seen this one
            self._responder.abort(self._engine_failure)

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
        self._engine.stop()
        self._sweeper.stop()
        self._responder.stop()
        self._stopped.set()
        for thread in self._threads:
            thread.join(_JOIN_S)
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
