"""How tensors travel between client and server: in shared memory, and compressed."""

import contextlib
import os
import socket
import threading
from collections.abc import Iterator

import numpy as np
import tritonclient.grpc as grpc_client
import tritonclient.http as http_client
import tritonclient.utils.shared_memory as shared_memory
from jitney.server.server import TritonServer

from tests.server.client import make_inputs

TENSOR = np.tile(np.arange(8, dtype=np.float32), (8, 1000))
"""A quarter of a megabyte that compresses well."""
SMALL = TENSOR.nbytes // 20


def test_tensors_pass_through_shared_memory(server: TritonServer) -> None:
    """The input lies in front in the region, and the output's place is behind it."""
    size = TENSOR.nbytes
    key = f"/jitney-test-{os.getpid()}"
    region = shared_memory.create_shared_memory_region("data", key, 2 * size)
    try:
        with grpc_client.InferenceServerClient(server.grpc_url) as client:
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


def test_compression_over_http(server: TritonServer) -> None:
    with metered(server.http_url) as (url, bytes_of):
        with http_client.InferenceServerClient(url) as client:
            result = client.infer(
                "doubled",
                make_inputs(http_client, {"x": TENSOR}),
                request_compression_algorithm="gzip",
                response_compression_algorithm="gzip",
            )
        np.testing.assert_array_equal(result.as_numpy("y"), 2 * TENSOR)
        assert 0 < bytes_of["sent"] < SMALL
        assert 0 < bytes_of["received"] < SMALL


def test_compression_over_grpc(server: TritonServer) -> None:
    """Requests by the client's argument, responses by the server's flag."""
    with metered(server.grpc_url) as (url, bytes_of):
        with grpc_client.InferenceServerClient(url) as client:
            inputs = make_inputs(grpc_client, {"x": TENSOR})
            result = client.infer("doubled", inputs, compression_algorithm="gzip")
        np.testing.assert_array_equal(result.as_numpy("y"), 2 * TENSOR)
        assert 0 < bytes_of["sent"] < SMALL
        assert 0 < bytes_of["received"] < SMALL
