"""A model on a running Triton server, over gRPC. The server joins requests into batches, so each
row is a request of its own. All share one kept connection.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Any

import numpy as np
from jitney.errors import InstallationError, InvalidArgumentError, install_extra
from jitney_gateway.ended_streams import EndedStreams
from jitney_server.standins.signature import Signature, TensorInfo

from jitney_jobs.asking import TIMEOUT_S, access_of
from jitney_jobs.failures import JobRefusedError, Meaning, RequestError
from jitney_jobs.job import Job
from jitney_jobs.tensors import Arrays

try:
    import grpc
    from tritonclient.grpc import aio
    from tritonclient.utils import InferenceServerException, np_to_triton_dtype
except ImportError:
    raise InstallationError(
        f"jobs on a server need tritonclient: {install_extra('jobs')}"
    ) from None

_CHANNEL_OPTIONS = (
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_reconnect_backoff_ms", 1000),  # a server that was started again is found soon
)
_CONFIG_S = 60.0
"""Longest time to ask for a model's configuration."""
_MEANINGS: Mapping[str, Meaning] = {
    "INVALID_ARGUMENT": Meaning.ROW,
    "OUT_OF_RANGE": Meaning.ROW,
    "UNAUTHENTICATED": Meaning.JOB,
    "PERMISSION_DENIED": Meaning.JOB,
    "UNAVAILABLE": Meaning.PASSING,
    "RESOURCE_EXHAUSTED": Meaning.BUSY,
    "NOT_FOUND": Meaning.PASSING,  # it was there when the job began: it may be loaded again
}
"""By gRPC's status, or by the code that opens the text of a stream's error. Others are FAULT."""
_AWAY = ("failed to connect", "connection refused", "dns resolution failed", "timed out")
"""What gRPC says in small letters if nobody answers."""
_LOADED_AGAIN = ("unknown model", "is not found", "is not ready", "is not healthy")
"""What the server says in small letters of a model whose process has died, or that it loads again.
A stream's error has no status of its own. Which of these it is depends on how far it got."""
_HANDSHAKE = ("certificate_verify_failed", "certificate verify failed", "wrong_version_number")
"""What it says if TLS is at fault."""


class TritonModel:
    """A model on the server."""

    signature = Signature((), ())
    """The tensors that must be given, and those that are answered. Known once it is opened."""
    is_language_model = False

    def __init__(self, job: Job) -> None:
        """Raises InvalidArgumentError for files that cannot be read."""
        self._job = job
        self._model = str(job.model)
        self._access = access_of(job)
        self._headers = dict(self._access.headers)
        self._client: Any = None
        self._batching = False
        self._ended_streams = EndedStreams()

    async def open(self) -> bool:
        """Ask what the model takes and gives. Raises RequestError, JobRefusedError for a key that
        is not let through, and InvalidArgumentError for a model that the server does not have."""
        if self._client is None:
            self._client = aio.InferenceServerClient(
                str(self._job.server),
                ssl=self._access.tls,
                root_certificates=self._job.ca_file,
                channel_args=_CHANNEL_OPTIONS,
            )
        try:
            answer = await self._client.get_model_config(
                self._model, headers=self._headers, as_json=True, client_timeout=_CONFIG_S
            )
        except InferenceServerException as error:
            raise self._error_of_opening(error) from None
        config = answer["config"]
        self._batching = config.get("max_batch_size", 0) > 0
        policy = config.get("model_transaction_policy", {})
        self.is_language_model = policy.get("decoupled", False)
        inputs = _tensors(config.get("input", []))
        outputs = _tensors(config.get("output", []))
        self.signature = Signature(inputs, outputs)
        return True

    def _error_of_opening(self, error: Any) -> Exception:
        failed = self._error(error)
        text = f"model {self._model} on {self._job.server}: {failed}"
        code = _code_of(error)
        if code in ("UNAUTHENTICATED", "PERMISSION_DENIED"):
            return JobRefusedError(text)
        if code not in ("UNAVAILABLE", "DEADLINE_EXCEEDED", "CANCELLED"):
            return InvalidArgumentError(text)
        return RequestError.of_meaning(failed.meaning, text)

    async def close(self) -> None:
        """End all requests in flight."""
        self._ended_streams.cancel()
        if self._client is not None:
            await self._client.close()

    async def ask(self, row: Arrays) -> Arrays:
        """The arrays of the only response. Raises RequestError."""
        inputs = []
        for name, array in row.items():
            array = array[None] if self._batching else array
            tensor = aio.InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype))
            inputs.append(tensor.set_data_from_numpy(array))
        try:
            if self.is_language_model:
                async with asyncio.timeout(TIMEOUT_S):
                    result = await self._only_response(inputs)
            else:
                result = await self._client.infer(
                    self._model, inputs, headers=self._headers, client_timeout=TIMEOUT_S
                )
        except TimeoutError:
            said = f"{self._job.server} sent nothing for {TIMEOUT_S:.0f} s"
            raise RequestError.of_meaning(Meaning.PASSING, said) from None
        except (InferenceServerException, grpc.RpcError) as error:
            raise self._error(error) from None
        arrays: dict[str, np.ndarray] = {}
        for output in result.get_response().outputs:
            arrays[output.name] = result.as_numpy(output.name)
        # A language model's last response has the finish reason of each sequence. A response
        # without one ("None") is not the last: the rest was lost (docs/contract.md, "Outputs").
        if self.is_language_model and b"None" in arrays.get("finish_reason", ()):
            raise RequestError.of_meaning(Meaning.PASSING, "the answer broke off")
        return {name: array[0] if self._batching else array for name, array in arrays.items()}

    async def _only_response(self, inputs: list[Any]) -> Any:
        """The only data response of a stream: a request that is not streamed has one."""

        async def sent_requests() -> AsyncIterator[dict[str, Any]]:
            yield {"model_name": self._model, "inputs": inputs}

        stream = self._client.stream_infer(sent_requests(), headers=self._headers)
        has_ended = False
        try:
            async for result, error in stream:
                has_ended = True
                if error is not None:
                    raise error
                return result
            raise RequestError.of_meaning(Meaning.PASSING, "the answer broke off")
        finally:
            if has_ended:
                self._ended_streams.add(stream)
            else:
                stream.cancel()

    def _error(self, error: Any) -> RequestError:
        """By its status, or by the code that opens the text of a stream's error."""
        text = self._access.hide(_text_of(error))
        code = _code_of(error)
        meaning = _MEANINGS.get(code, Meaning.FAULT)
        lower = text.lower()
        if code == "DEADLINE_EXCEEDED":
            # In a stream's text it is the row's own deadline. Else the server sent nothing.
            is_own = text.startswith(code)
            meaning = Meaning.ROW if is_own else Meaning.PASSING
        elif code == "UNAVAILABLE" and any(said in lower for said in _HANDSHAKE):
            meaning = Meaning.JOB
        elif code == "UNAVAILABLE" and any(said in lower for said in _AWAY):
            meaning = Meaning.AWAY
        elif code == "UNAVAILABLE" and "queue is full" in lower:
            meaning = Meaning.BUSY
        elif any(said in lower for said in _LOADED_AGAIN):
            meaning = Meaning.PASSING
        return RequestError.of_meaning(meaning, text)


def _text_of(error: Any) -> str:
    if isinstance(error, grpc.RpcError):
        return str(error.details())
    return str(error.message())


def _code_of(error: Any) -> str:
    """Such as UNAVAILABLE."""
    if isinstance(error, grpc.RpcError):
        return error.code().name
    status = str(error.status() or "")
    return status.rpartition(".")[2] or _text_of(error).partition(":")[0]


def _tensors(declared: list[Mapping[str, Any]]) -> tuple[TensorInfo, ...]:
    return tuple(
        TensorInfo(each["name"], each["data_type"], tuple(int(dim) for dim in each["dims"]))
        for each in declared
        if not each.get("optional")
    )
