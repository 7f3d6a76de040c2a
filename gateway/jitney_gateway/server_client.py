"""The connection to a Triton server, over gRPC: which models it has, and their answers.

Each request has a stream of its own. It is read as fast as responses come, so a client that reads
slowly does not hold up others. A stream that the gateway leaves in the middle is cancelled. A
stream whose sequences have ended is read to its end instead: if it is cancelled at its final
response, this server (2.51) may never be able to unload the model.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from typing import Any

import grpc
import msgspec
import numpy as np
from jitney.errors import CancelledError, JitneyError, UnavailableError, from_code
from tritonclient.grpc import aio
from tritonclient.utils import InferenceServerException

from jitney_gateway.model_description import ModelDescription
from jitney_gateway.refusals import UnknownModelError
from jitney_gateway.server_request import InputValue, ServerRequest

_LOG = logging.getLogger(__name__)

GENERATING = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
"""The endpoints that :meth:`ServerClient.find_model_for` accepts for a language model. Only batches
ask it for one of these, and a batch cannot be for ``/v1/messages``. ``language.py`` serves all of
them without asking."""
MAX_WAITING = 4096
"""Steps of one answer that may wait for a slow client."""
_FRESH_S = 30.0
"""Seconds for which the gateway trusts what it knows of a model."""
_LOOK_S = 5.0
"""Seconds between two looks at which models are ready."""
_RELOAD_S = 600.0
"""A model that was ready so many seconds ago, and is not now, is expected to come back."""
_ADAPTERS_FRESH_S = 1.0
"""Seconds for which the gateway trusts that a model lacks an adapter that a client asks for."""
_CODES = ("INVALID_ARGUMENT", "UNAVAILABLE", "DEADLINE_EXCEEDED", "CANCELLED", "INTERNAL")
_CHANNEL_OPTIONS = (
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_reconnect_backoff_ms", 1000),  # a server that was started again is found soon
)
_DATATYPES = {"|O": "BYTES", "|b1": "BOOL", "<i4": "INT32", "<i8": "INT64"}
"""A numpy dtype -> the server's datatype."""


class Step(msgspec.Struct):
    """What one response of the server adds to the ``n`` sequences of one prompt."""

    prompt: int
    """Index of the prompt in the client's request."""
    texts: list[str]
    finish_reasons: list[str | None]
    """Of each sequence: None until it ends, then the reason, which every later step has too."""
    num_tokens: list[int]
    """New tokens of each sequence."""
    num_prompt_tokens: int
    logprobs: list[list[dict[str, dict[str, Any]]]] | None
    """For each sequence and new token, as in docs/contract.md."""
    timing: dict[str, Any]
    """Empty before the last step."""
    stop_strings: list[str | None] = []
    """The stop string that ended each sequence, if that was asked for."""
    prompt_logprobs: list[dict[str, dict[str, Any]] | None] | None = None
    """For each token of the prompt, in its first step, if they were asked for. None for the first
    token, which nothing precedes."""
    output_ids: list[int] = []
    """New tokens of the one sequence, if they were asked for."""

    def logprobs_of(self, index: int) -> list[dict[str, dict[str, Any]]]:
        """Those of the new tokens of one sequence; empty if none were asked for."""
        return self.logprobs[index] if self.logprobs else []


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

    def has_adapter(self, name: str) -> bool:
        """Whether one of its adapters has that name."""
        return self.description is not None and name in self.description.adapters

    def adapter(self, name: str) -> "ServedModel":
        """The adapter of that name, as a model."""
        return msgspec.structs.replace(self, name=name, base=self.name)

    def alias(self, name: str) -> "ServedModel":
        """The same model under another name."""
        return msgspec.structs.replace(self, name=name)


class ServerClient:
    """A client of one server. Its methods raise UnavailableError if the server does not answer."""

    def __init__(self, address: str, aliases: Mapping[str, str] | None = None) -> None:
        """``aliases``: another name of a model or adapter -> its own name."""
        self.aliases = dict(aliases or {})
        self._client = aio.InferenceServerClient(address, channel_args=_CHANNEL_OPTIONS)
        self._models: dict[str, ServedModel] = {}
        self._ready_at: dict[str, float] = {}
        """Name of a model, no adapter -> when it was last seen ready; monotonic seconds."""
        self._draining: set[asyncio.Task[None]] = set()
        """Tasks that read ended streams to their end. They are held here because the event loop
        does not keep them from being collected."""

    async def close(self) -> None:
        """End all requests in flight."""
        await self._client.close()

    async def is_ready(self) -> bool:
        """Whether the server says that it is ready."""
        with contextlib.suppress(InferenceServerException):
            return bool(await self._client.is_server_ready(client_timeout=5.0))
        return False

    # ------------------------------------------------------------------ models

    @contextlib.asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """While it is entered, looks now and then which models are ready, and learns of each. So a
        model that is loaded again is known even if nobody has asked for it yet."""
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
                _LOG.debug("nobody knows which models are ready: %s", error)
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
        """Names of the models that are ready, or were so a while ago and are expected back."""
        ready = await self.ready_models()
        for name in ready:
            self._ready_at[name] = time.monotonic()
        return sorted(name for name in {*ready, *self._ready_at} if self._is_expected(name))

    def known_model(self, name: str) -> ServedModel | None:
        """What is known of a model or adapter, without asking the server; of a model that is not
        ready too, if it is expected back."""
        known = self._models.get(self._own_name(name))
        if known is None or not self._is_expected(known.base or known.name):
            return None
        return known

    def _is_expected(self, name: str) -> bool:
        """Whether the model is ready, or was so a while ago: it is loaded again if it has died."""
        ready_at = self._ready_at.get(name)
        return ready_at is not None and time.monotonic() - ready_at <= _RELOAD_S

    async def ready_models(self) -> list[str]:
        """Names of the models that are ready."""
        # The statistics list them. The repository's index would too, but it needs the server's key.
        with _translated_errors():
            statistics = await self._client.get_inference_statistics(as_json=True)
        return sorted({entry["name"] for entry in statistics.get("model_stats", [])})

    async def language_model(self, name: str) -> ModelDescription:
        """The description of a model. Raises UnknownModelError for a model that is not ready, or
        that is no language model."""
        model = await self.find_model(name)
        if model.description is None:
            raise UnknownModelError(f"model {name!r} is no language model")
        return model.description

    async def find_model_for(self, endpoint: str, name: str) -> ServedModel:
        """A model that serves an endpoint such as ``/v1/embeddings``. Raises UnknownModelError if
        it does not, or if it is not ready."""
        model = await self.find_model(name)
        served = {f"/v1/{model.endpoint}"}
        if model.description is not None:
            served.update(GENERATING)
        if endpoint not in served:
            raise UnknownModelError(f"model {name!r} does not serve {endpoint}")
        return model

    async def find_model(self, name: str) -> ServedModel:
        """A model, or an adapter of one; it has its own name, whatever alias was asked for. Raises
        UnknownModelError if it is not ready, and UnavailableError if it is expected back."""
        name = self._own_name(name)
        known = self._models.get(name)
        if known is not None and time.monotonic() - known.fetched_at <= _FRESH_S:
            return known
        try:
            model = await self._fetch_model(name)
        except UnknownModelError:
            adapter = await self._find_adapter(name)
            if adapter is None:
                # The old entry stays. A request in progress may have been taken under this name,
                # and `_with_adapter` needs the entry to send it.
                raise
            model = adapter
        self._models[name] = model
        return model

    def _own_name(self, name: str) -> str:
        """The name for which ``name`` is an alias, or itself."""
        return self.aliases.get(name, name)

    def base_of(self, name: str) -> str:
        """The model that the adapter ``name`` belongs to, as far as it was asked for. Else the
        model of that name."""
        name = self._own_name(name)
        known = self._models.get(name)
        if known is None or known.base is None:
            return name
        return known.base

    async def _find_adapter(self, name: str) -> ServedModel | None:
        """The adapter of that name, of the first model that has one. A model that does not answer
        is passed over, unless it is known to have the adapter: then its error is raised."""
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
        """The model ``name``, fetched again if it may have got the adapter meanwhile. Unlike
        :meth:`find_model`, this does not take ``name`` for an adapter's. Raises UnknownModelError
        if the model is not ready."""
        known = self._models.get(name)
        if known is not None:
            may_get_it = known.description is not None and not known.has_adapter(adapter)
            fresh_s = _ADAPTERS_FRESH_S if may_get_it else _FRESH_S
            if time.monotonic() - known.fetched_at <= fresh_s:
                return known
        model = await self._fetch_model(name)
        self._models[name] = model
        return model

    async def _fetch_model(self, name: str) -> ServedModel:
        """Ask the server for a model. Raises UnknownModelError if it is not ready, and
        UnavailableError if it is expected back."""
        with self._translated_errors_of(name):
            answer = await self._client.get_model_config(name, as_json=True)
        config = answer["config"]
        endpoint = config.get("parameters", {}).get("openai_endpoint", {})
        model = ServedModel(
            name=name,
            endpoint=endpoint.get("string_value", ""),
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

    @contextlib.contextmanager
    def _translated_errors_of(self, model: str) -> Iterator[None]:
        """Raise the client library's errors as ours. For the server, a model that is loaded again
        is an unknown one meanwhile; for our clients it is unavailable."""
        try:
            with _translated_errors(model):
                yield
        except UnknownModelError:
            if not self._is_expected(model):
                raise
            raise UnavailableError(f"model {model!r} is not ready; it may be loading") from None

    # ------------------------------------------------------------------ answers

    async def infer(self, model: str, tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The outputs of a model that is no language model."""
        name = self._own_name(model)
        with self._translated_errors_of(name):
            result = await self._client.infer(name, _input_tensors(tensors))
        return _output_arrays(result)

    async def infer_task(self, request: ServerRequest) -> dict[str, Any]:
        """The outputs of a language model for a task such as ``tokenize``, which has one
        response."""
        return await self._last_response(self._with_adapter(request))

    async def _last_response(self, request: ServerRequest) -> dict[str, Any]:
        last: dict[str, Any] = {}
        async with contextlib.aclosing(self._responses(request, None)) as responses:
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
        try:
            async with contextlib.aclosing(self._responses(request, headers)) as responses:
                async for outputs in responses:
                    if queue.qsize() >= MAX_WAITING:
                        raise CancelledError(f"{MAX_WAITING:,} responses wait for their client")
                    queue.put_nowait(_step(prompt, outputs))
        except Exception as error:
            failure = error
        queue.put_nowait(failure)

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

    async def _responses(
        self, request: ServerRequest, headers: Mapping[str, str] | None
    ) -> AsyncGenerator[dict[str, Any]]:
        """The outputs of each response to one request. It ends in one of three ways:

        - with the final response, or with an error: then the stream is read to its end;
        - the stream breaks off before: UnavailableError, and the stream is cancelled;
        - the caller leaves in the middle: the stream is cancelled.
        """

        async def sent_requests() -> AsyncIterator[dict[str, Any]]:
            arrays = {name: _array(value) for name, value in request.inputs.items()}
            yield {
                "model_name": request.model,
                "inputs": _input_tensors(arrays),
                "request_id": request.request_id,
            }

        with self._translated_errors_of(request.model):
            stream = self._client.stream_infer(sent_requests(), headers=dict(headers or {}))
            has_ended = False
            try:
                async for result, error in stream:
                    if error is not None:
                        has_ended = True
                        raise error
                    outputs = _output_arrays(result)
                    has_ended = _is_last(outputs)
                    yield outputs
                    if has_ended:
                        return
                raise UnavailableError("the answer broke off")
            finally:
                if has_ended:
                    self._drain(stream)
                else:
                    stream.cancel()

    def _drain(self, stream: Any) -> None:
        """Read a stream to its end, beside whatever comes next."""
        drain = asyncio.create_task(_read_to_end(stream))
        self._draining.add(drain)
        drain.add_done_callback(self._draining.discard)


def _is_last(outputs: Mapping[str, Any]) -> bool:
    """Whether a response is the last one of its request. Without one, an answer was cut off."""
    if "finish_reason" not in outputs:
        return True  # a task has one response
    have_all_ended = b"None" not in outputs["finish_reason"]
    return have_all_ended and "timing" in outputs


async def _read_to_end(stream: Any) -> None:
    with contextlib.suppress(Exception):
        async for _ in stream:
            pass


@contextlib.contextmanager
def _translated_errors(model: str = "") -> Iterator[None]:
    """Raise the client library's errors as ours."""
    try:
        yield
    except InferenceServerException as error:
        raise translated(model, str(error.status() or ""), str(error.message())) from None
    except grpc.RpcError as error:
        raise translated(model, str(error.code()), str(error.details())) from None


def translated(model: str, status: str, text: str) -> JitneyError:
    """The error of a call to ``model``, from gRPC's status and the text.

    The text of an error of our backend begins with a code, because a stream's error has no status
    of its own.
    """
    code, _, message = text.partition(": ")
    if code in _CODES:
        return from_code(code, message)
    code = status.rpartition(".")[2]  # "StatusCode.UNAVAILABLE"
    if "is not healthy" in text:  # its process has died, and the server has not been told so yet
        return UnavailableError(f"model {model!r} is not ready; it may be loading")
    # For an unknown model the server has texts and no status of its own.
    is_unknown = "is not found" in text or "is not ready" in text
    if code == "NOT_FOUND" or is_unknown:
        return UnknownModelError(f"model {model!r} does not exist or is not ready")
    if code == "UNAVAILABLE":
        return UnavailableError(f"the server does not answer: {text[:200]}")
    return from_code(code, text)


def _step(prompt: int, outputs: Mapping[str, Any]) -> Step:
    reasons = [reason.decode() for reason in outputs["finish_reason"]]
    logprobs = outputs.get("logprobs")
    if logprobs is not None:
        logprobs = [msgspec.json.decode(text) for text in logprobs]
    prompt_logprobs = outputs.get("prompt_logprobs")
    if prompt_logprobs is not None:
        prompt_logprobs = msgspec.json.decode(prompt_logprobs[0])
    timing = outputs.get("timing")
    output_ids = outputs.get("output_ids")
    return Step(
        prompt=prompt,
        texts=[text.decode() for text in outputs["text_output"]],
        finish_reasons=[None if reason == "None" else reason for reason in reasons],
        num_tokens=outputs["num_output_tokens"].tolist(),
        num_prompt_tokens=int(outputs["num_input_tokens"][0]),
        logprobs=logprobs,
        timing={} if timing is None else msgspec.json.decode(timing[0]),
        stop_strings=[text.decode() or None for text in outputs.get("stop_string", ())],
        prompt_logprobs=prompt_logprobs,
        output_ids=[] if output_ids is None else output_ids.tolist(),
    )


def _array(value: InputValue) -> np.ndarray:
    if isinstance(value, list):
        return np.array(value, np.int32)
    if isinstance(value, bytes):
        return np.array([value], np.object_)
    return np.array([value], np.bool_)


def _input_tensors(arrays: Mapping[str, np.ndarray]) -> list[aio.InferInput]:
    tensors = []
    for name, array in arrays.items():
        tensor = aio.InferInput(name, list(array.shape), _DATATYPES[array.dtype.str])
        tensors.append(tensor.set_data_from_numpy(array))
    return tensors


def _output_arrays(result: Any) -> dict[str, np.ndarray]:
    outputs = result.get_response().outputs
    return {output.name: result.as_numpy(output.name) for output in outputs}
