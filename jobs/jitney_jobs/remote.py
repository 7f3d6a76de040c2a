"""A model on a running Triton server, over gRPC. The server joins requests into batches, so each
row is a request of its own.
"""

import queue
from collections.abc import Mapping
from functools import partial
from typing import Any

from jitney.errors import InstallationError, JitneyError, UnavailableError, from_code
from jitney_server.standins.signature import Signature, TensorInfo

from jitney_jobs.asking import TIMEOUT_S, access_of
from jitney_jobs.job import Job
from jitney_jobs.tensors import Arrays

try:
    from tritonclient import grpc
    from tritonclient.utils import InferenceServerException, np_to_triton_dtype
except ImportError:
    raise InstallationError(
        "jobs on a server need tritonclient: pip install 'tritonclient[grpc]'"
    ) from None


class TritonModel:
    """A model on the server. Any thread may call it."""

    def __init__(self, job: Job) -> None:
        """Raises UnavailableError if the server or the model is not there, and
        InvalidArgumentError for files that cannot be read."""
        self._address = str(job.server)
        self._model = str(job.model)
        self._access = access_of(job)
        self._connect = partial(
            grpc.InferenceServerClient,
            self._address,
            ssl=self._access.tls,
            root_certificates=job.ca_file,
        )
        self._headers = dict(self._access.headers)
        self._client = self._connect()
        self._call = partial(self._client.infer, headers=self._headers, client_timeout=TIMEOUT_S)
        try:
            answer = self._client.get_model_config(self._model, headers=self._headers, as_json=True)
        except InferenceServerException as error:
            why = self._access.hide(str(error.message()))
            raise UnavailableError(f"model {job.model} on {job.server}: {why}") from None
        config = answer["config"]
        self._batching = config.get("max_batch_size", 0) > 0
        policy = config.get("model_transaction_policy", {})
        self.is_language_model = policy.get("decoupled", False)
        inputs = _tensors(config.get("input", []))
        outputs = _tensors(config.get("output", []))
        self.signature = Signature(inputs, outputs)

    def ask(self, row: Arrays) -> Arrays | JitneyError:
        """The arrays of the only response."""
        inputs = []
        for name, array in row.items():
            array = array[None] if self._batching else array
            tensor = grpc.InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype))
            inputs.append(tensor.set_data_from_numpy(array))
        try:
            if self.is_language_model:
                result = self._stream(inputs)
            else:
                result = self._call(self._model, inputs)
        except InferenceServerException as error:
            return self._error(error)
        except queue.Empty:
            return UnavailableError(f"{self._address} sent nothing for {TIMEOUT_S:.0f} s")
        names = [output.name for output in result.get_response().outputs]
        arrays = {name: result.as_numpy(name) for name in names}
        # A language model's last response has the finish reason of each sequence. A response
        # without one ("None") is not the last: the rest was lost (docs/contract.md, "Outputs").
        if self.is_language_model and b"None" in arrays.get("finish_reason", ()):
            return UnavailableError("the answer broke off")
        return {name: array[0] if self._batching else array for name, array in arrays.items()}

    def _stream(self, inputs: list[Any]) -> Any:
        """The only data response: a request that is not streamed has one."""
        client = self._connect()
        events: queue.Queue[tuple[Any, Any]] = queue.Queue()
        client.start_stream(
            lambda result, error: events.put((result, error)), headers=self._headers
        )
        try:
            client.async_stream_infer(self._model, inputs)
            result, error = events.get(timeout=TIMEOUT_S)
        except BaseException:
            client.stop_stream(cancel_requests=True)
            raise
        # Not by a cancel: one that meets the final response crashes the server (2.51), or keeps it
        # from ever unloading the model.
        client.stop_stream()
        if error is not None:
            raise error
        return result

    def _error(self, error: Any) -> JitneyError:
        """By its status, or by the code that opens the text of a stream's error."""
        text = self._access.hide(str(error.message()))
        code = str(error.status() or "").rpartition(".")[2] or text.partition(":")[0]
        return from_code(code, text)


def _tensors(declared: list[Mapping[str, Any]]) -> tuple[TensorInfo, ...]:
    return tuple(
        TensorInfo(each["name"], each["data_type"], tuple(int(dim) for dim in each["dims"]))
        for each in declared
        if not each.get("optional")
    )
