"""The connection to a Triton server, over gRPC. Errors of the client library are raised as ours.

Each request has a stream of its own. It is read as fast as responses come, so a client that reads
slowly does not hold up others. A stream that the gateway leaves in the middle is cancelled. A
stream whose sequences have ended is read to its end instead: if it is cancelled at its final
response, this server (2.51) may never be able to unload the model.

``server_client.py`` knows the models of the server, and makes the requests.
"""

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from typing import Any

import grpc
import numpy as np
from jitney.errors import JitneyError, UnavailableError, from_code
from tritonclient.grpc import aio
from tritonclient.utils import InferenceServerException

from jitney_gateway.ended_streams import EndedStreams
from jitney_gateway.refusals import UnknownModelError
from jitney_gateway.server_request import InputValue, ServerRequest

_READY_S = 5.0
"""Seconds for the server to say that it is ready."""
_CODES = ("INVALID_ARGUMENT", "UNAVAILABLE", "DEADLINE_EXCEEDED", "CANCELLED", "INTERNAL")
"""With one of these the text of an error of our backend begins."""
_CHANNEL_OPTIONS = (
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_reconnect_backoff_ms", 1000),  # a server that was started again is found soon
)
_DATATYPES = {"|O": "BYTES", "|b1": "BOOL", "<i4": "INT32", "<i8": "INT64"}
"""A numpy dtype -> the server's datatype."""


class ServerConnection:
    """A connection to one server. Its methods raise UnavailableError if the server does not answer,
    and UnknownModelError for a model that the server does not have ready."""

    def __init__(self, address: str) -> None:
        self._client = aio.InferenceServerClient(address, channel_args=_CHANNEL_OPTIONS)
        self._ended_streams = EndedStreams()

    async def close(self) -> None:
        """End all requests in flight."""
        await self._client.close()

    async def is_ready(self) -> bool:
        """Whether the server says that it is ready."""
        with contextlib.suppress(InferenceServerException):
            return bool(await self._client.is_server_ready(client_timeout=_READY_S))
        return False

    async def ready_models(self) -> list[str]:
        """Names of the models that are ready."""
        # The statistics list them. The repository's index would too, but it needs the server's key.
        with _translated_errors():
            statistics = await self._client.get_inference_statistics(as_json=True)
        return sorted({entry["name"] for entry in statistics.get("model_stats", [])})

    async def model_config(self, name: str) -> dict[str, Any]:
        """A model's config.pbtxt, as JSON."""
        with _translated_errors(name):
            answer = await self._client.get_model_config(name, as_json=True)
        config: dict[str, Any] = answer["config"]
        return config

    async def infer(self, model: str, tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The outputs of a model that is no language model."""
        with _translated_errors(model):
            result = await self._client.infer(model, _input_tensors(tensors))
        return _output_arrays(result)

    async def responses(
        self, request: ServerRequest, headers: Mapping[str, str] | None = None
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

        with _translated_errors(request.model):
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
                    self._ended_streams.add(stream)
                else:
                    stream.cancel()


def _is_last(outputs: Mapping[str, Any]) -> bool:
    """Whether a response is the last one of its request. An answer that ends before it was cut
    off."""
    if "finish_reason" not in outputs:
        return True  # a task has one response
    have_all_ended = b"None" not in outputs["finish_reason"]
    return have_all_ended and "timing" in outputs


# ------------------------------------------------------------------------------- errors


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
    code_in_text, _, message = text.partition(": ")
    if code_in_text in _CODES:
        return from_code(code_in_text, message)
    code = status.rpartition(".")[2]  # of "StatusCode.UNAVAILABLE"
    if "is not healthy" in text:  # its process has died, and the server has not been told so yet
        return UnavailableError(f"model {model!r} is not ready; it may be loading")
    # In a stream, the server's errors have texts alone. Those of an unknown model end in "is not
    # found", "is not at ready state" or, after it was unloaded, "has no available versions".
    is_unknown = "unknown model" in text or "is not ready" in text
    if code == "NOT_FOUND" or is_unknown:
        return UnknownModelError(f"model {model!r} does not exist or is not ready")
    if code == "UNAVAILABLE":
        return UnavailableError(f"the server does not answer: {text[:200]}")
    return from_code(code, text)


# ------------------------------------------------------------------------------- tensors


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
