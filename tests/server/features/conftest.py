"""Two real servers for all features: one with the server's defaults, one with a response cache and
the rate limiter. Both are open: their clients load models and register shared memory."""

from collections.abc import Callable, Iterator

import pytest
from jitney.server import TritonServer

from tests.server.features.calls import Caller, Recorder
from tests.server.features.repository import write_features, write_limited

# The configurations here are complete: saves a short-lived process per model at the start.
COMPLETE = ["--disable-auto-complete-config"]


@pytest.fixture(scope="package")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    """All models of ``write_features``. gRPC responses are compressed for those who accept it."""
    repository = tmp_path_factory.mktemp("features") / "repository"
    write_features(repository)
    flags = ["--grpc-infer-response-compression-level=high", *COMPLETE]
    with TritonServer(repository, open_endpoints=True, extra_args=flags) as started:
        yield started
        assert started.stop(), started.unclean


@pytest.fixture(scope="package")
def limited_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    """All models of ``write_limited``."""
    repository = tmp_path_factory.mktemp("limited") / "repository"
    write_limited(repository)
    flags = [
        "--cache-config=local,size=1048576",
        "--rate-limit=execution_count",
        "--rate-limit-resource=TOKENS:4",
        *COMPLETE,
    ]
    with TritonServer(repository, open_endpoints=True, extra_args=flags) as started:
        yield started
        assert started.stop(), started.unclean


@pytest.fixture
def caller(server: TritonServer) -> Iterator[Caller]:
    """A client of ``server``."""
    made = Caller(server)
    yield made
    made.client.close()


@pytest.fixture
def limited_caller(limited_server: TritonServer) -> Iterator[Caller]:
    """A client of ``limited_server``."""
    made = Caller(limited_server)
    yield made
    made.client.close()


@pytest.fixture
def recorder(server: TritonServer) -> Iterator[Callable[[str], Recorder]]:
    """``recorder(model)`` of ``server``; in the end all its gates are opened."""
    yield from _recorders(server)


@pytest.fixture
def limited_recorder(limited_server: TritonServer) -> Iterator[Callable[[str], Recorder]]:
    """The same of ``limited_server``."""
    yield from _recorders(limited_server)


def _recorders(server: TritonServer) -> Iterator[Callable[[str], Recorder]]:
    made: list[Recorder] = []

    def make(model: str) -> Recorder:
        made.append(Recorder(server, model))
        return made[-1]

    yield make
    for one in made:
        one.open_all()
