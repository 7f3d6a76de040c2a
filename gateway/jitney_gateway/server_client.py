"""The models of a Triton server, and their answers.

Owns what the gateway knows of models: which are ready, which adapters they have, and which were
ready a while ago and are expected back. ``server_connection.py`` has the connection.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
from jitney.errors import CancelledError, JitneyError, UnavailableError

from jitney_gateway.model_description import ModelDescription
from jitney_gateway.model_steps import Step, step_of_outputs
from jitney_gateway.refusals import UnknownModelError
from jitney_gateway.server_connection import ServerConnection
from jitney_gateway.server_request import ServerRequest

_LOG = logging.getLogger(__name__)

GENERATING = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
"""The endpoints that :meth:`ServerClient.find_model_for` accepts for a language model: those that a
batch can be for."""
MAX_WAITING = 4096
"""Steps of one answer that may wait for a slow client."""
_FRESH_S = 30.0
"""Seconds for which the gateway trusts what it knows of a model."""
_LOOK_S = 5.0
"""Seconds between two looks at which models are ready."""
_RELOAD_S = 600.0
"""Seconds for which a model that is no longer ready is expected back."""
_ADAPTERS_FRESH_S = 1.0
"""Seconds for which the gateway trusts that a model lacks an adapter that a client asks for."""


class ServedModel(msgspec.Struct):
    """What the gateway knows of a model."""

    name: str
    endpoint: str
    """The parameter ``openai_endpoint`` of its config.pbtxt, or empty."""
    config: dict[str, Any]
    description: ModelDescription | None
    """None: it is no language model."""
    fetched_at: float
    """When the server was asked; monotonic seconds."""
    base: str | None = None
    """Of an adapter: the model that it belongs to."""

    def parameter(self, name: str) -> str:
        """A parameter of its config.pbtxt; empty if it is not there."""
        return _parameter(self.config, name)

    def has_adapter(self, name: str) -> bool:
        """Whether one of its adapters has that name."""
        return self.description is not None and name in self.description.adapters

    def adapter(self, name: str) -> "ServedModel":
        """The adapter of that name, as a model."""
        return msgspec.structs.replace(self, name=name, base=self.name)

    def alias(self, name: str) -> "ServedModel":
        """The same model under another name."""
        return msgspec.structs.replace(self, name=name)


def _parameter(config: Mapping[str, Any], name: str) -> str:
    """A parameter of a config.pbtxt; empty if it is not there."""
    parameter = config.get("parameters", {}).get(name, {})
    text: str = parameter.get("string_value", "")
    return text


class ServerClient:
    """A client of one server. Its methods raise UnavailableError if the server does not answer."""

    def __init__(self, address: str, aliases: Mapping[str, str] | None = None) -> None:
        """``aliases``: another name of a model or adapter -> its own name."""
        self.aliases = dict(aliases or {})
        self._connection = ServerConnection(address)
        self._models: dict[str, ServedModel] = {}
        """Name of a model or adapter -> what is known of it."""
        self._ready_at: dict[str, float] = {}
        """Name of a model, no adapter -> when it was last seen ready; monotonic seconds."""

    async def close(self) -> None:
        """End all requests in flight."""
        await self._connection.close()

    async def is_ready(self) -> bool:
        """Whether the server says that it is ready."""
        return await self._connection.is_ready()

    # ------------------------------------------------------------------ which models there are

    @contextlib.asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """A context in which the client looks every few seconds which models are ready, and asks
        about each new one. So it knows a model that is loaded again, even if no client has asked
        for it before."""
        watch = asyncio.create_task(self._watch())
        try:
            yield
        finally:
            watch.cancel()

    async def _watch(self) -> None:
        while True:
            try:
                await self._learn_models()
            except JitneyError as error:
                _LOG.debug("the server does not tell which models are ready: %s", error)
            except Exception:
                _LOG.exception("a look at the server's models failed")
            await asyncio.sleep(_LOOK_S)

    async def _learn_models(self) -> None:
        for name in await self.listed_models():
            if name in self._models:
                continue
            try:
                await self.find_model(name)
            except JitneyError as error:
                _LOG.debug("model %r is not known yet: %s", name, error)

    async def listed_models(self) -> list[str]:
        """Names of the models that are ready, and of those that are expected back."""
        ready = await self.ready_models()
        for name in ready:
            self._ready_at[name] = time.monotonic()
        return sorted(name for name in {*ready, *self._ready_at} if self._is_expected(name))

    async def ready_models(self) -> list[str]:
        """Names of the models that are ready."""
        return await self._connection.ready_models()

    def _is_expected(self, name: str) -> bool:
        """Whether the model was ready within the last ``_RELOAD_S`` seconds: a model that dies is
        loaded again."""
        ready_at = self._ready_at.get(name)
        return ready_at is not None and time.monotonic() - ready_at <= _RELOAD_S

    @contextlib.contextmanager
    def _unavailable_if_expected(self, model: str) -> Iterator[None]:
        """Raise UnavailableError in place of UnknownModelError, if the model is expected back. The
        server does not know a model while it loads it again."""
        try:
            yield
        except UnknownModelError:
            if not self._is_expected(model):
                raise
            raise UnavailableError(f"model {model!r} is not ready; it may be loading") from None

    # ------------------------------------------------------------------ one model

    def known_model(self, name: str) -> ServedModel | None:
        """What is known of a model or adapter, without asking the server. None if the gateway has
        never seen it, or if it is neither ready nor expected back."""
        known = self._models.get(self._own_name(name))
        if known is None or not self._is_expected(known.base or known.name):
            return None
        return known

    async def language_model(self, name: str) -> ModelDescription:
        """The description of a model. Raises as ``find_model``, and UnknownModelError for a model
        that is no language model."""
        model = await self.find_model(name)
        if model.description is None:
            raise UnknownModelError(f"model {name!r} is no language model")
        return model.description

    async def find_model_for(self, endpoint: str, name: str) -> ServedModel:
        """A model that serves an endpoint such as ``/v1/embeddings``. Raises as ``find_model``, and
        UnknownModelError if the model does not serve it."""
        model = await self.find_model(name)
        served = {f"/v1/{model.endpoint}"}
        if model.description is not None:
            served.update(GENERATING)
        if endpoint not in served:
            raise UnknownModelError(f"model {name!r} does not serve {endpoint}")
        return model

    async def find_model(self, name: str) -> ServedModel:
        """A model, or an adapter of one; it has its own name, whatever alias was asked for. Raises
        UnavailableError if it is expected back, and UnknownModelError if it is not."""
        name = self._own_name(name)
        known = self._models.get(name)
        if known is not None and time.monotonic() - known.fetched_at <= _FRESH_S:
            return known
        try:
            model = await self._fetch_model(name)
        except UnknownModelError:
            adapter = await self._find_adapter(name)
            if adapter is None:
                # What is known stays: `_with_adapter` may still need it, for a request that was
                # taken under this name and is not sent yet.
                raise
            model = adapter
        self._models[name] = model
        return model

    def _own_name(self, name: str) -> str:
        """The name for which ``name`` is an alias, or itself."""
        return self.aliases.get(name, name)

    async def _fetch_model(self, name: str) -> ServedModel:
        """Ask the server for a model. Raises UnavailableError if it is expected back, and
        UnknownModelError if it is not."""
        with self._unavailable_if_expected(name):
            config = await self._connection.model_config(name)
        model = ServedModel(
            name=name,
            endpoint=_parameter(config, "openai_endpoint"),
            config=config,
            description=None,
            fetched_at=time.monotonic(),
        )
        if config.get("backend") == "jitney":
            request = ServerRequest(model=name, inputs={"task": b"describe"})
            arrays = await self._last_response(request)
            text = arrays["text_output"][0]
            model.description = msgspec.json.decode(text, type=ModelDescription)
        self._ready_at[name] = time.monotonic()
        return model

    # ------------------------------------------------------------------ adapters

    def base_of(self, name: str) -> str:
        """The model to which the adapter ``name`` belongs, if that is known. Else the name
        itself."""
        name = self._own_name(name)
        known = self._models.get(name)
        if known is None or known.base is None:
            return name
        return known.base

    async def _find_adapter(self, name: str) -> ServedModel | None:
        """The adapter of that name, of the first model that has one; None if none has it.

        A model that does not answer is passed over. But if it was known to have the adapter, its
        error is raised.
        """
        for base in await self.listed_models():
            try:
                model = await self._find_base(base, adapter=name)
            except UnknownModelError:
                continue  # it has just been unloaded
            except JitneyError as error:
                known = self._models.get(base)
                if known is not None and known.has_adapter(name):
                    raise
                _LOG.warning("adapter %r is not looked for in model %r: %s", name, base, error)
                continue
            if model.has_adapter(name):
                return model.adapter(name)
        return None

    async def _find_base(self, name: str, *, adapter: str) -> ServedModel:
        """The model ``name``, which may have the ``adapter``. What is known of it is trusted for a
        short time only, if it had no such adapter. Raises as ``_fetch_model``.

        Unlike :meth:`find_model`, this does not take ``name`` for the name of an adapter.
        """
        known = self._models.get(name)
        if known is not None:
            fresh_s = _FRESH_S
            is_language_model = known.description is not None
            if is_language_model and not known.has_adapter(adapter):
                fresh_s = _ADAPTERS_FRESH_S  # the adapter may have been added since
            if time.monotonic() - known.fetched_at <= fresh_s:
                return known
        model = await self._fetch_model(name)
        self._models[name] = model
        return model

    def _with_adapter(self, request: ServerRequest) -> ServerRequest:
        """The request as the server understands it: an adapter is a parameter of its model."""
        name = self._own_name(request.model)
        base = self.base_of(name)
        if base == name:
            return msgspec.structs.replace(request, model=name)
        text = request.inputs.get("sampling_parameters", b"{}")
        assert isinstance(text, bytes)
        params = msgspec.json.decode(text) | {"lora_name": name}
        inputs = request.inputs | {"sampling_parameters": msgspec.json.encode(params)}
        return msgspec.structs.replace(request, model=base, inputs=inputs)

    # ------------------------------------------------------------------ answers

    async def infer(self, model: str, tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The outputs of a model that is no language model."""
        name = self._own_name(model)
        with self._unavailable_if_expected(name):
            return await self._connection.infer(name, tensors)

    async def infer_task(self, request: ServerRequest) -> dict[str, Any]:
        """The outputs of a language model for a task such as ``tokenize``, which has one
        response."""
        return await self._last_response(self._with_adapter(request))

    async def _last_response(self, request: ServerRequest) -> dict[str, Any]:
        last: dict[str, Any] = {}
        responses = self._connection.responses(request)
        with self._unavailable_if_expected(request.model):
            async with contextlib.aclosing(responses):
                async for outputs in responses:
                    last = outputs
        return last

    async def generate(
        self, requests: Sequence[ServerRequest], headers: Mapping[str, str] | None = None
    ) -> AsyncGenerator[Step]:
        """The steps of all requests as they come.

        A caller that leaves the iterator cancels the requests that have not ended. Raises the first
        error of any request.
        """
        # A reader puts its request's steps into the queue, and at the end its error or None.
        queue: asyncio.Queue[Step | Exception | None] = asyncio.Queue()
        readers = []
        for prompt, request in enumerate(requests):
            reading = self._read_steps(prompt, self._with_adapter(request), headers, queue)
            readers.append(asyncio.create_task(reading))
        open_requests = len(readers)
        try:
            while open_requests > 0:
                entry = await queue.get()
                if isinstance(entry, Step):
                    yield entry
                elif entry is None:
                    open_requests -= 1
                else:
                    raise entry
        finally:
            for reader in readers:
                reader.cancel()

    async def _read_steps(
        self,
        prompt: int,
        request: ServerRequest,
        headers: Mapping[str, str] | None,
        queue: asyncio.Queue[Step | Exception | None],
    ) -> None:
        """Put the steps of one request into ``queue``; then the error that ended it, or None."""
        failure: Exception | None = None
        responses = self._connection.responses(request, headers)
        try:
            with self._unavailable_if_expected(request.model):
                async with contextlib.aclosing(responses):
                    async for outputs in responses:
                        if queue.qsize() >= MAX_WAITING:
                            raise CancelledError(f"{MAX_WAITING:,} responses wait for their client")
                        queue.put_nowait(step_of_outputs(prompt, outputs))
        except Exception as error:
            failure = error
        queue.put_nowait(failure)
