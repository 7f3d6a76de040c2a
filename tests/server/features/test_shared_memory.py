"""System shared memory: a client's tensors pass through a region that both sides map."""

import itertools
import os
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpc_client
import tritonclient.http as http_client
import tritonclient.utils.shared_memory as shared_memory
from jitney.server import TritonServer
from tritonclient.utils import InferenceServerException

MODEL = "onnx_by_six"
TENSOR = np.arange(64, dtype=np.float32).reshape(4, 16)
SIZE = TENSOR.nbytes
_numbers = itertools.count(1)


class Region:
    """A registered region of ``2 * SIZE`` bytes: the input in front, the output's place behind."""

    def __init__(self, client: Any) -> None:
        self.client = client
        self.name = f"region-{next(_numbers)}"
        self.key = f"/jitney-test-{os.getpid()}-{self.name}"
        self.handle = shared_memory.create_shared_memory_region(self.name, self.key, 2 * SIZE)
        shared_memory.set_shared_memory_region(self.handle, [TENSOR])
        client.register_system_shared_memory(self.name, self.key, 2 * SIZE)

    def output(self) -> np.ndarray:
        """What lies in the second half now."""
        return shared_memory.get_contents_as_numpy(
            self.handle, np.float32, TENSOR.shape, offset=SIZE
        )

    def close(self) -> None:
        """Unregister and remove it."""
        self.client.unregister_system_shared_memory(self.name)
        shared_memory.destroy_shared_memory_region(self.handle)


@pytest.fixture(params=[grpc_client, http_client], ids=["grpc", "http"])
def module(request: pytest.FixtureRequest) -> ModuleType:
    """Each of the two clients."""
    return request.param


@pytest.fixture
def client(server: TritonServer, module: ModuleType) -> Iterator[Any]:
    url = server.grpc_url if module is grpc_client else server.http_url
    made = module.InferenceServerClient(url)
    yield made
    made.close()


@pytest.fixture
def region(client: Any) -> Iterator[Region]:
    made = Region(client)
    yield made
    made.close()


def _infer(
    module: ModuleType,
    client: Any,
    region: str,
    *,
    offset: int = 0,
    size: int = SIZE,
    output: tuple[int, int] = (SIZE, SIZE),
) -> Any:
    """X from ``region`` at ``offset``, Y to it at ``output``: (bytes, offset)."""
    x = module.InferInput("X", list(TENSOR.shape), "FP32")
    x.set_shared_memory(region, size, offset=offset)
    y = module.InferRequestedOutput("Y")
    y.set_shared_memory(region, output[0], offset=output[1])
    return client.infer(MODEL, [x], outputs=[y])


def _bytes_in_answer(module: ModuleType, result: Any) -> int:
    """How much of the output the response itself carried."""
    if module is grpc_client:
        return sum(len(raw) for raw in result.get_response().raw_output_contents)
    output = result.get_output("Y")
    assert "data" not in output
    return output.get("parameters", {}).get("binary_data_size", 0)


def test_input_and_output_pass_through_the_region(
    module: ModuleType, client: Any, region: Region
) -> None:
    result = _infer(module, client, region.name)
    np.testing.assert_array_equal(region.output(), 6 * TENSOR)
    assert _bytes_in_answer(module, result) == 0
    shared_memory.set_shared_memory_region(region.handle, [TENSOR + 1])
    _infer(module, client, region.name)  # what lies there now, not what lay there before
    np.testing.assert_array_equal(region.output(), 6 * (TENSOR + 1))


def test_an_input_may_lie_at_an_offset(module: ModuleType, client: Any, region: Region) -> None:
    shared_memory.set_shared_memory_region(region.handle, [TENSOR - 9], offset=SIZE)
    _infer(module, client, region.name, offset=SIZE, output=(SIZE, 0))
    first_half = shared_memory.get_contents_as_numpy(region.handle, np.float32, TENSOR.shape)
    np.testing.assert_array_equal(first_half, 6 * (TENSOR - 9))


def test_the_status_lists_the_region(client: Any, region: Region) -> None:
    status = client.get_system_shared_memory_status()
    names = (
        [entry["name"] for entry in status] if isinstance(status, list) else list(status.regions)
    )
    assert region.name in names


def test_an_unregistered_region_is_refused(module: ModuleType, client: Any, region: Region) -> None:
    client.unregister_system_shared_memory(region.name)
    with pytest.raises(InferenceServerException, match=region.name):
        _infer(module, client, region.name)


def test_a_region_that_does_not_exist_is_refused(client: Any) -> None:
    with pytest.raises(InferenceServerException, match="nowhere"):
        client.register_system_shared_memory("nowhere", "/jitney-test-nowhere", SIZE)


@pytest.mark.parametrize("offset", [SIZE + 4, 2 * SIZE, 1 << 40])
def test_an_input_beyond_the_region_is_refused(
    module: ModuleType, client: Any, region: Region, offset: int
) -> None:
    with pytest.raises(InferenceServerException, match=r"offset|exceed|range"):
        _infer(module, client, region.name, offset=offset)
    _infer(module, client, region.name)
    np.testing.assert_array_equal(region.output(), 6 * TENSOR)


def test_an_output_beyond_the_region_is_refused(
    module: ModuleType, client: Any, region: Region
) -> None:
    with pytest.raises(InferenceServerException, match=r"offset|exceed|range"):
        _infer(module, client, region.name, output=(SIZE, SIZE + 4))


def test_an_output_larger_than_its_place_is_refused(
    module: ModuleType, client: Any, region: Region
) -> None:
    with pytest.raises(InferenceServerException, match=r"smaller|size"):
        _infer(module, client, region.name, output=(SIZE - 4, SIZE))
