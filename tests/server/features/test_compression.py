"""Compression of requests and responses, as the bytes on the wire show it."""

import gzip
import zlib
from collections.abc import Callable

import numpy as np
import pytest
import tritonclient.grpc as grpc_client
import tritonclient.http as http_client
from jitney.server import TritonServer

from tests.server.features.calls import infer_inputs
from tests.server.features.wire import Wire

MODEL = "onnx_by_six"
TENSOR = np.tile(np.arange(8, dtype=np.float32), (8, 1000))
"""A quarter of a megabyte that compresses well."""
SMALL = TENSOR.nbytes // 20

DECOMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.decompress,
    "deflate": zlib.decompress,
}


@pytest.mark.parametrize("algorithm", ["gzip", "deflate"])
def test_http(server: TritonServer, algorithm: str) -> None:
    with Wire(server.http_url) as wire:
        client = http_client.InferenceServerClient(wire.url)
        result = client.infer(
            MODEL,
            infer_inputs(http_client, {"X": TENSOR}),
            request_compression_algorithm=algorithm,
            response_compression_algorithm=algorithm,
        )
        np.testing.assert_array_equal(result.as_numpy("Y"), 6 * TENSOR)
        client.close()
        messages = wire.http_messages()
    assert len(messages) == 2
    for (headers, body), tensor in zip(messages, (TENSOR, 6 * TENSOR), strict=True):
        assert headers["Content-Encoding"] == algorithm
        assert len(body) < SMALL
        assert tensor.tobytes() in DECOMPRESS[algorithm](body)


def test_http_is_not_compressed_unless_asked(server: TritonServer) -> None:
    with Wire(server.http_url) as wire:
        client = http_client.InferenceServerClient(wire.url)
        client.infer(MODEL, infer_inputs(http_client, {"X": TENSOR}))
        client.close()
        messages = wire.http_messages()
    for headers, body in messages:
        assert "Content-Encoding" not in headers
        assert len(body) >= TENSOR.nbytes


@pytest.mark.parametrize("algorithm", ["gzip", "deflate"])
def test_grpc(server: TritonServer, algorithm: str) -> None:
    """Requests by the client's argument; responses by the server's flag, in the same algorithm."""
    with Wire(server.grpc_url) as wire:
        client = grpc_client.InferenceServerClient(wire.url)
        inputs = infer_inputs(grpc_client, {"X": TENSOR})
        result = client.infer(MODEL, inputs, compression_algorithm=algorithm)
        np.testing.assert_array_equal(result.as_numpy("Y"), 6 * TENSOR)
        client.close()
        sent, received = wire.grpc_messages("sent"), wire.grpc_messages("received")
    for messages, tensor in ((sent, TENSOR), (received, 6 * TENSOR)):
        assert len(messages) == 1
        compressed, message = messages[0]
        assert compressed
        assert len(message) < SMALL
        plain = zlib.decompress(message, wbits=zlib.MAX_WBITS | 32)  # gzip's or zlib's header
        assert tensor.tobytes() in plain


def test_grpc_requests_are_not_compressed_unless_asked(server: TritonServer) -> None:
    with Wire(server.grpc_url) as wire:
        client = grpc_client.InferenceServerClient(wire.url)
        client.infer(MODEL, infer_inputs(grpc_client, {"X": TENSOR}))
        client.close()
        messages = wire.grpc_messages("sent")
    assert [compressed for compressed, _ in messages] == [False]
    assert len(messages[0][1]) >= TENSOR.nbytes
