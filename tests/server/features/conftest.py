"""Two real servers for all features: one with the server's defaults, one with a response cache and
the rate limiter. Both are open: their clients load models and register shared memory."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from jitney.server.server import TritonServer

from tests.server.features.calls import Caller
from tests.server.features.repository import write_features, write_limited


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What is shown here is Triton's own work, not this package's."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.slow)


def serve(folder: Path, write: Callable[[Path], None], *flags: str) -> Iterator[TritonServer]:
    """A server of the models that ``write`` makes. Their configurations are complete: the first
    flag saves a short-lived process per model at the start."""
    write(folder / "repository")
    arguments = ["--disable-auto-complete-config", *flags]
    with TritonServer(folder / "repository", open_endpoints=True, extra_args=arguments) as started:
        yield started
        assert started.stop(), started.unclean


@pytest.fixture(scope="package")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    """All models of ``write_features``. gRPC responses are compressed for those who accept it."""
    flag = "--grpc-infer-response-compression-level=high"
    yield from serve(tmp_path_factory.mktemp("features"), write_features, flag)


@pytest.fixture(scope="package")
def limited_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    """All models of ``write_limited``."""
    flags = (
        "--cache-config=local,size=1048576",
        "--rate-limit=execution_count",
        "--rate-limit-resource=TOKENS:4",
    )
    yield from serve(tmp_path_factory.mktemp("limited"), write_limited, *flags)


@pytest.fixture
def caller(server: TritonServer) -> Iterator[Caller]:
    """A client of ``server``."""
    with Caller(server) as made:
        yield made


@pytest.fixture
def limited_caller(limited_server: TritonServer) -> Iterator[Caller]:
    """A client of ``limited_server``."""
    with Caller(limited_server) as made:
        yield made
