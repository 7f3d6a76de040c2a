"""A model on a running Triton server, over gRPC, with a bounded number of requests under way.

The server joins the requests into batches, so each row is a request of its own.
"""

import queue
from collections.abc import Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from functools import partial
from typing import Any

from jitney.errors import InstallationError, JitneyError, UnavailableError, from_code
from jitney.offline.tensors import Arrays
from jitney.standins.signature import Signature, TensorInfo

try:
    from tritonclient import grpc
    from tritonclient.utils import InferenceServerException, np_to_triton_dtype
except ImportError:
    raise InstallationError(
        "jobs on a server need tritonclient: pip install 'tritonclient[grpc]'"
    ) from None

_TIMEOUT_S = 600.0
"""Without a response for so long, a request is given up."""


class InServer:
    """So many threads, each with a request of its own."""

    def __init__(self, address: str, model: str, at_once: int) -> None:
        """Raises UnavailableError if the server or the model is not there."""
        self._address, self._model = address, model
        self.capacity = 2 * at_once
        self._client = grpc.InferenceServerClient(address)
        self._threads = ThreadPoolExecutor(at_once)
        self._running: dict[Future[Any], int] = {}
        self._call = partial(self._client.infer, client_timeout=_TIMEOUT_S)
        self.figures: dict[str, float] = {}
        try:
            config = self._client.get_model_config(model, as_json=True)["config"]
        except InferenceServerException as error:
            raise UnavailableError(f"model {model} on {address}: {error.message()}") from None
        self._batching = config.get("max_batch_size", 0) > 0
        self.language = config.get("model_transaction_policy", {}).get("decoupled", False)
        self.signature = Signature(
            *(_tensors(config.get(each, [])) for each in ("input", "output"))
        )

    def __len__(self) -> int:
        return len(self._running)

    def rank(self, prepared: Arrays, ending: bool) -> int:
        return 0

    def submit(self, key: int, prepared: Arrays) -> None:
        self._running[self._threads.submit(self._ask, prepared)] = key

    def step(self) -> list[tuple[int, Any]]:
        """Wait until a request has ended, or a moment."""
        ended = wait(self._running, 0.2, FIRST_COMPLETED).done
        return [(self._running.pop(future), future.result()) for future in ended]

    def close(self) -> None:
        self._threads.shutdown(wait=True, cancel_futures=True)

    # ------------------------------------------------------------------ one of the threads

    def _ask(self, row: Arrays) -> Arrays | JitneyError:
        inputs = []
        for name, array in row.items():
            array = array[None] if self._batching else array
            tensor = grpc.InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype))
            inputs.append(tensor.set_data_from_numpy(array))
        try:
            result = self._stream(inputs) if self.language else self._call(self._model, inputs)
        except InferenceServerException as error:
            return _error(error)
        except queue.Empty:
            return UnavailableError(f"{self._address} sent nothing for {_TIMEOUT_S:.0f} s")
        names = [output.name for output in result.get_response().outputs]
        arrays = {name: result.as_numpy(name) for name in names}
        return {name: array[0] if self._batching else array for name, array in arrays.items()}

    def _stream(self, inputs: list[Any]) -> Any:
        """The only data response: a request that is not streamed has one."""
        client = grpc.InferenceServerClient(self._address)
        events: queue.Queue[tuple[Any, Any]] = queue.Queue()
        client.start_stream(lambda result, error: events.put((result, error)))
        try:
            client.async_stream_infer(self._model, inputs)
            result, error = events.get(timeout=_TIMEOUT_S)
        except BaseException:
            client.stop_stream(cancel_requests=True)
            raise
        # Not by a cancel: one that meets the final response crashes the server (2.51), or keeps it
        # from ever unloading the model.
        client.stop_stream()
        if error is not None:
            raise error
        return result


def _tensors(declared: list[Mapping[str, Any]]) -> tuple[TensorInfo, ...]:
    return tuple(
        TensorInfo(each["name"], each["data_type"], tuple(int(dim) for dim in each["dims"]))
        for each in declared
        if not each.get("optional")
    )


def _error(error: Any) -> JitneyError:
    """By its status, or by the code that opens the text of a stream's error."""
    text = str(error.message())
    code = str(error.status() or "").rpartition(".")[2] or text.partition(":")[0]
    return from_code(code, text)
