"""What a user reads of Ray's errors: a line of ours, and nothing of Ray's processes."""

import logging
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from jitney.errors import LoadError, UnavailableError

pytest.importorskip("ray")
from jitney_jobs import ray_cluster
from jitney_jobs.ray_errors import failure_of
from jitney_jobs.ray_library import ray

from tests.http_server import Quiet, listening

TRACE = "Traceback (most recent call last):\n  File ..."


def of_task(cause: Exception) -> BaseException:
    """As ``ray.get`` raises it for a task that raised ``cause``."""
    error: BaseException = ray.exceptions.RayTaskError("read", TRACE, cause).as_instanceof_cause()
    return error


def test_our_own_errors_come_as_they_were_raised() -> None:
    of_data = ray.exceptions.UserCodeException("a UDF failed")
    of_data.__cause__ = of_task(LoadError("no such model"))
    for error in (of_task(LoadError("no such model")), of_data):
        found = failure_of(error)
        assert type(found) is LoadError
        assert str(found) == "no such model"


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (of_task(ModuleNotFoundError("No module named 'x'")), "ModuleNotFoundError: No module"),
        (ray.exceptions.OutOfMemoryError(TRACE), "a node had no memory left"),
        (ray.exceptions.ActorDiedError(), "an actor died"),
        (ray.exceptions.RaySystemError(TRACE), "RaySystemError"),
        (of_task(ray.exceptions.NodeDiedError(TRACE)), "a node died"),
    ],
    ids=["import", "memory", "actor", "other", "node"],
)
def test_other_errors_are_one_line_of_ours(
    error: BaseException, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    """What Ray says is in the log."""
    caplog.set_level(logging.INFO)
    found = failure_of(error)
    assert type(found) is UnavailableError
    assert str(found).startswith(f"the Ray cluster failed: {text}")
    assert "Traceback" not in str(found)
    assert "\n" not in str(found)
    assert "`jitney batch resume` goes on, with --ray or without" in str(found)
    assert "Ray says: " in caplog.text


def test_no_cluster_on_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    def init(*_: Any, **__: Any) -> None:
        raise ConnectionError("specify the one to connect to by the flag --address")

    fake = SimpleNamespace(init=init, _private=SimpleNamespace(worker=SimpleNamespace()))
    monkeypatch.setattr(ray_cluster, "ray", fake)
    with ExitStack() as closing, pytest.raises(UnavailableError) as caught:
        ray_cluster.Cluster("auto", closing)
    expected = "no Ray cluster runs on this machine (--ray auto), and RAY_ADDRESS names none"
    assert str(caught.value) == expected


@contextmanager
def silent() -> Iterator[str]:
    """The address of a server that never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


@contextmanager
def closed() -> Iterator[str]:
    """An address where nothing listens."""
    with silent() as address:
        pass
    yield address


@pytest.mark.parametrize(
    ("server", "text"),
    [
        (lambda: listening(Quiet), "what answers there is no Ray"),
        (silent, "timed out"),
        (closed, "Connection refused"),
    ],
    ids=["http", "silent", "closed"],
)
def test_an_address_where_no_ray_answers(
    server: Any, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray itself would try for minutes."""
    monkeypatch.setattr(ray_cluster, "CONNECT_S", 0.5)
    with server() as address, ExitStack() as closing, pytest.raises(UnavailableError) as caught:
        ray_cluster.Cluster(address, closing)
    assert str(caught.value).startswith(f"Ray is not at {address}: ")
    assert text in str(caught.value)
