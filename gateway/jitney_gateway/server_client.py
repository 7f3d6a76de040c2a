"""The models of a server, over gRPC.

Each request has a stream of its own, which is read as fast as it comes, so that a client that reads
slowly holds up nobody. A stream is cancelled only in the middle: one that is cancelled at its final
response may keep the server (2.51) from unloading the model, so an answer whose sequences have
ended is read to its end.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from typing import Any

import grpc
import msgspec
import numpy as np
from jitney.errors import CancelledError, JitneyError, UnavailableError, from_code
from tritonclient.grpc import aio
from tritonclient.utils import InferenceServerException

from jitney_gateway.refusals import UnknownModelError
from jitney_gateway.server_request import ModelDescription, ServerRequest

GENERATING = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
"""Endpoints of language models."""
MAX_WAITING = 4096
"""Steps of one answer that may wait for a slow client."""
_FRESH_S = 30.0
"""Seconds for which what is known of a model is taken to be true."""
_STALE_S = 1.0
"""Seconds after which it is asked again for an adapter that it did not have."""
_CODES = ("INVALID_ARGUMENT", "UNAVAILABLE", "DEADLINE_EXCEEDED", "CANCELLED", "INTERNAL")
_CHANNEL = (
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_reconnect_backoff_ms", 1000),  # a server that was started again is found soon
)
_KINDS = {"U": "BYTES", "O": "BYTES", "b": "BOOL", "i": "INT32"}


class Step(msgspec.Struct):
    """What is new of one prompt's ``n`` sequences."""

    prompt: int
    """Index of the prompt in the request."""
    texts: list[str]
    finish_reasons: list[str | None]
    """Once a sequence has ended, in every later step too."""
    num_tokens: list[int]
    """New ones."""
    num_prompt_tokens: int
    logprobs: list[list[dict[str, dict[str, Any]]]] | None
    """Per sequence and new token, as in docs/contract.md."""
    timing: dict[str, Any]
    """On the last step; else empty."""
    stop_strings: list[str | None] = []
    """Which ended each sequence, if that was asked for."""


class ServedModel(msgspec.Struct):
    """What is known of a model."""

    name: str
    endpoint: str
    """The parameter ``openai_endpoint`` of its config.pbtxt, or empty."""
    config: dict[str, Any]
    description: ModelDescription | None
    """Of a language model."""
    at: float
    """When it was asked; monotonic seconds."""
    base: str | None = None
    """Of an adapter: the model it belongs to."""

    def has_adapter(self, name: str) -> bool:
        """Whether one of its adapters has that name."""
        return self.description is not None and name in self.description.adapters

    def adapter(self, name: str) -> "ServedModel":
        """What is known of one of its adapters."""
        return msgspec.structs.replace(self, name=name, base=self.name)


class ServerClient:
    """One server. Raises UnavailableError where it does not answer."""

    def __init__(self, address: str) -> None:
        self._client = aio.InferenceServerClient(address, channel_args=_CHANNEL)
        self._models: dict[str, ServedModel] = {}
        self._ending: set[asyncio.Task[None]] = set()  # streams that are read to their end

    async def close(self) -> None:
        """Ends what is under way."""
        await self._client.close()

    async def is_ready(self) -> bool:
        """Whether the server says so."""
        with contextlib.suppress(InferenceServerException):
            return bool(await self._client.is_server_ready(client_timeout=5.0))
        return False

    async def names(self) -> list[str]:
        """Of the models that are ready. Not from the repository's index, which a key protects."""
        with _translated():
            found = await self._client.get_inference_statistics(as_json=True)
        return sorted({each["name"] for each in found.get("model_stats", [])})

    async def language_model(self, name: str) -> ModelDescription:
        """Raises UnknownModelError for a model that is not ready, or none of language."""
        found = (await self.look(name)).description
        if found is None:
            raise UnknownModelError(f"model {name!r} is no language model")
        return found

    async def check(self, endpoint: str, name: str) -> None:
        """Raises UnknownModelError for a model that does not serve an endpoint such as
        ``/v1/embeddings``."""
        model = await self.look(name)
        served = {f"/v1/{model.endpoint}"}
        if model.description is not None:
            served.update(GENERATING)
        if endpoint not in served:
            raise UnknownModelError(f"model {name!r} does not serve {endpoint}")

    async def look(self, name: str) -> ServedModel:
        """What is known of a model. Raises UnknownModelError if it is not ready."""
        found = self._models.get(name)
        if found is None or time.monotonic() - found.at > _FRESH_S:
            try:
                found = await self._ask(name)
            except UnknownModelError:
                found = await self._find_adapter(name)
                if found is None:  # what was known stays: others may be about to ask it
                    raise
            self._models[name] = found
        return found

    async def _find_adapter(self, name: str) -> ServedModel | None:
        """An adapter of one of the models; of the first, if several have one of that name."""
        for base in await self.names():
            with contextlib.suppress(UnknownModelError):  # it has just been unloaded
                model = await self.look(base)
                stale = time.monotonic() - model.at > _STALE_S
                if stale and model.description is not None and not model.has_adapter(name):
                    # It may have got the adapter since.
                    model = await self._ask(base)
                    self._models[base] = model
                if model.has_adapter(name):
                    return model.adapter(name)
        return None

    async def _ask(self, name: str) -> ServedModel:
        with _translated(name):
            answer = await self._client.get_model_config(name, as_json=True)
        config = answer["config"]
        endpoint = config.get("parameters", {}).get("openai_endpoint", {})
        model = ServedModel(
            name=name,
            endpoint=endpoint.get("string_value", ""),
            config=config,
            description=None,
            at=time.monotonic(),
        )
        if config.get("backend") == "jitney":
            arrays = await self._perform(ServerRequest(model=name, inputs={"task": b"describe"}))
            text = arrays["text_output"][0]
            model.description = msgspec.json.decode(text, type=ModelDescription)
        return model

    async def infer(self, model: str, tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Ask a model that has one response."""
        with _translated(model):
            result = await self._client.infer(model, _inputs(tensors))
        return _arrays(result)

    async def perform(
        self, ask: ServerRequest, headers: Mapping[str, str] | None = None
    ) -> dict[str, Any]:
        """The arrays of a language model's only response."""
        return await self._perform(self._resolve(ask), headers)

    async def _perform(
        self, ask: ServerRequest, headers: Mapping[str, str] | None = None
    ) -> dict[str, Any]:
        async with contextlib.aclosing(self._responses(ask, headers)) as responses:
            made = [each async for each in responses]
        return made[-1]

    async def generate(
        self, asks: Sequence[ServerRequest], headers: Mapping[str, str] | None = None
    ) -> AsyncGenerator[Step]:
        """The steps of all asks as they come; whoever leaves the iterator cancels what has not
        ended. Raises the first error of any."""
        news: asyncio.Queue[Step | Exception | None] = asyncio.Queue()
        pumps = [
            asyncio.create_task(self._pump(index, self._resolve(ask), headers, news))
            for index, ask in enumerate(asks)
        ]
        left = len(pumps)
        try:
            while left:
                new = await news.get()
                if isinstance(new, Step):
                    yield new
                elif new is None:
                    left -= 1
                else:
                    raise new
        finally:
            for pump in pumps:
                pump.cancel()

    async def _pump(
        self,
        index: int,
        ask: ServerRequest,
        headers: Mapping[str, str] | None,
        news: asyncio.Queue[Step | Exception | None],
    ) -> None:
        """Put the steps of one ask, and then why there are no more; None: it has ended."""
        end: Exception | None = None
        try:
            async with contextlib.aclosing(self._responses(ask, headers)) as responses:
                async for arrays in responses:
                    if news.qsize() >= MAX_WAITING:
                        raise CancelledError(f"{MAX_WAITING:,} responses wait for their client")
                    news.put_nowait(_step(index, arrays))
        except Exception as error:
            end = error
        news.put_nowait(end)

    def _resolve(self, ask: ServerRequest) -> ServerRequest:
        """What the server is asked: an adapter's model, with parameters that name the adapter."""
        known = self._models.get(ask.model)
        if known is None or known.base is None:
            return ask
        params = ask.inputs.get("sampling_parameters", b"{}")
        assert isinstance(params, bytes)
        named = msgspec.json.encode(msgspec.json.decode(params) | {"lora_name": ask.model})
        inputs = ask.inputs | {"sampling_parameters": named}
        return msgspec.structs.replace(ask, model=known.base, inputs=inputs)

    async def _responses(
        self, ask: ServerRequest, headers: Mapping[str, str] | None
    ) -> AsyncGenerator[dict[str, Any]]:
        async def requests() -> AsyncIterator[dict[str, Any]]:
            inputs = _inputs({name: _array(value) for name, value in ask.inputs.items()})
            yield {"model_name": ask.model, "inputs": inputs, "request_id": ask.request_id}

        with _translated(ask.model):
            stream = self._client.stream_infer(requests(), headers=dict(headers or {}))
            ended = False
            try:
                async for result, error in stream:
                    arrays = {} if result is None else _arrays(result)
                    ended = "timing" in arrays or "finish_reason" not in arrays
                    if error is not None:
                        raise error
                    yield arrays
                    if ended:
                        break
                if not ended:
                    raise UnavailableError("the answer broke off")
            finally:
                if ended:
                    drain = asyncio.create_task(_drain(stream))
                    self._ending.add(drain)
                    drain.add_done_callback(self._ending.discard)
                else:
                    stream.cancel()


async def _drain(stream: Any) -> None:
    with contextlib.suppress(Exception):
        async for _ in stream:
            pass


@contextlib.contextmanager
def _translated(model: str = "") -> Iterator[None]:
    """The client's errors as ours: by their status, or by the code that opens a stream's error."""
    try:
        yield
    except InferenceServerException as error:
        raise translated(model, str(error.status() or ""), str(error.message())) from None
    except grpc.RpcError as error:
        raise translated(model, str(error.code()), str(error.details())) from None


def translated(model: str, status: str, text: str) -> JitneyError:
    """The error of a call to ``model``; ``text`` opens with a code if the model is ours."""
    code, _, said = text.partition(": ")
    if code in _CODES:
        return from_code(code, said)
    code = status.rpartition(".")[2]
    if code == "NOT_FOUND" or "is not found" in text or "is not ready" in text:
        return UnknownModelError(f"model {model!r} does not exist or is not ready")
    if code == "UNAVAILABLE":
        return UnavailableError(f"the server does not answer: {text[:200]}")
    return from_code(code, text)


def _step(index: int, arrays: Mapping[str, Any]) -> Step:
    reasons = [reason.decode() for reason in arrays["finish_reason"]]
    logprobs = arrays.get("logprobs")
    stop_strings = arrays.get("stop_string", ())
    timing = arrays.get("timing")
    return Step(
        prompt=index,
        texts=[text.decode() for text in arrays["text_output"]],
        finish_reasons=[None if reason == "None" else reason for reason in reasons],
        num_tokens=arrays["num_output_tokens"].tolist(),
        num_prompt_tokens=int(arrays["num_input_tokens"][0]),
        logprobs=None if logprobs is None else [msgspec.json.decode(each) for each in logprobs],
        timing={} if timing is None else msgspec.json.decode(timing[0]),
        stop_strings=[text.decode() or None for text in stop_strings],
    )


def _array(value: bytes | list[int] | bool) -> np.ndarray:
    if isinstance(value, list):
        return np.array(value, np.int32)
    return np.array([value], np.object_ if isinstance(value, bytes) else np.bool_)


def _inputs(tensors: Mapping[str, np.ndarray]) -> list[aio.InferInput]:
    made = []
    for name, array in tensors.items():
        tensor = aio.InferInput(name, list(array.shape), _KINDS[array.dtype.kind])
        made.append(tensor.set_data_from_numpy(array))
    return made


def _arrays(result: Any) -> dict[str, np.ndarray]:
    return {each.name: result.as_numpy(each.name) for each in result.get_response().outputs}
