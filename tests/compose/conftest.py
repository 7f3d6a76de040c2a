"""A proxy and the server behind it, for all tests of one file."""

from collections.abc import Iterator

import pytest

from tests.compose.proxy import Proxy, Server, serve


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serve() as server:
        yield server


@pytest.fixture(scope="module")
def shared(server: Server) -> Iterator[Proxy]:
    """One with the usual settings, but for a rate that tests do not meet."""
    settings = {"REQUESTS_PER_SECOND": "1000", "BURST": "1000", "DRAIN_SECONDS": "2"}
    with Proxy(server, **settings) as proxy:
        yield proxy


@pytest.fixture
def proxy(shared: Proxy, server: Server) -> Proxy:
    """The same; what the server has seen is forgotten."""
    server.seen.clear()
    server.called.clear()
    server.begun.clear()
    return shared
