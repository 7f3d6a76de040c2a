"""How tensors travel: through shared memory, and compressed."""

import contextlib
import os
import socket
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpc_client
import tritonclient.http as http_client
import tritonclient.utils.shared_memory as shared_memory
from jitney_server.server import TritonServer

from tests.real_server.client import make_inputs
from tests.server.standins import onnx_models
from tests.server.standins.onnx_models import ONE, io

pytestmark = pytest.mark.slow  # what is shown here is Triton's own work, not this package's


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    """An open one: its clients register shared memory."""
    repository = tmp_path_factory.mktemp("transport")
    tensors = io("input", "x", "TYPE_FP32", "[ -1 ]") + io("output", "y", "TYPE_FP32", "[ -1 ]")
    config = f'backend: "onnxruntime"\nmax_batch_size: 8\n{tensors}{ONE}'
    onnx_models.write_model(repository, "doubled", onnx_models.doubled(), config)
    flags = ["--grpc-infer-response-compression-level=high"]
    with TritonServer(repository, open_endpoints=True, extra_args=flags) as started:
        yield started
        assert started.stop(), started.last_stop.problem


TENSOR = np.tile(np.arange(8, dtype=np.float32), (8, 1000))
"""A quarter of a megabyte that compresses well."""


def test_tensors_pass_through_shared_memory(client: Any) -> None:
    """The input lies in front in the region, and the output's place is behind it."""
    size, key = TENSOR.nbytes, f"/jitney-test-{os.getpid()}"
    region = shared_memory.create_shared_memory_region("data", key, 2 * size)
    try:
        client.register_system_shared_memory("data", key, 2 * size)
        shared_memory.set_shared_memory_region(region, [TENSOR])
        given = grpc_client.InferInput("x", list(TENSOR.shape), "FP32")
        given.set_shared_memory("data", size, offset=0)
        wanted = grpc_client.InferRequestedOutput("y")
        wanted.set_shared_memory("data", size, offset=size)
        response = client.infer("doubled", [given], outputs=[wanted]).get_response()
        client.unregister_system_shared_memory("data")
        made = shared_memory.get_contents_as_numpy(region, np.float32, TENSOR.shape, offset=size)
        np.testing.assert_array_equal(made, 2 * TENSOR)
        assert sum(map(len, response.raw_output_contents)) == 0
    finally:
        shared_memory.destroy_shared_memory_region(region)


@contextlib.contextmanager
def metered(target: str) -> Iterator[tuple[str, dict[str, int]]]:
    """An address that leads to ``target``, and how many bytes were sent and received there."""
    host, port = target.rsplit(":", 1)
    counts = {"sent": 0, "received": 0}

    def pump(source: socket.socket, sink: socket.socket, direction: str) -> None:
        with contextlib.suppress(OSError):  # either side has gone
            while data := source.recv(1 << 16):
                counts[direction] += len(data)
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)

    def accept() -> None:
        with contextlib.suppress(OSError):  # the listener is closed
            while True:
                near, far = listener.accept()[0], socket.create_connection((host, int(port)))
                for way in ((near, far, "sent"), (far, near, "received")):
                    threading.Thread(target=pump, args=way, daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=accept, daemon=True).start()
        yield f"127.0.0.1:{listener.getsockname()[1]}", counts
        listener.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_compression(server: TritonServer, protocol: str) -> None:
    """Over gRPC: requests by the client's argument, responses by the server's flag."""
    module: Any = http_client if protocol == "http" else grpc_client
    ways = ("request_", "response_") if protocol == "http" else ("",)
    with metered(getattr(server, f"{protocol}_url")) as (url, passed):
        with module.InferenceServerClient(url) as client:
            asked = {f"{way}compression_algorithm": "gzip" for way in ways}
            result = client.infer("doubled", make_inputs(module, {"x": TENSOR}), **asked)
        np.testing.assert_array_equal(result.as_numpy("y"), 2 * TENSOR)
        assert 0 < passed["sent"] < TENSOR.nbytes // 20
        assert 0 < passed["received"] < TENSOR.nbytes // 20
