"""The thread in an engine's process that reads what the front sends."""

import socket

import pytest
from jitney.engine import process
from jitney.engine.engine import Engine
from jitney.engine.wire import Frames, ToEngine, ToFront
from jitney.messages import (
    Submit,
)
from jitney.read_config import make_config
from jitney.sampling_params import SamplingParams

from tests.fake_runner import FakeRunner


@pytest.mark.parametrize(
    ("sent", "status", "logged"), [(None, 0, 0), (b"\0\0\0\0" * 4, 1, 1)], ids=["gone", "garbage"]
)
def test_an_engine_that_cannot_read_its_front_says_why(
    monkeypatch: pytest.MonkeyPatch, sent: bytes | None, status: int, logged: int
) -> None:
    """An engine whose front is gone just ends."""
    statuses: list[int] = []
    said: list[str] = []
    monkeypatch.setattr(process.os, "_exit", statuses.append)
    monkeypatch.setattr(process._log, "exception", said.append)
    ours, theirs = socket.socketpair()
    with theirs:
        if sent is not None:
            ours.sendall(sent)
        ours.close()
        process._read(Frames[ToEngine](theirs, ToEngine), engine=None)  # type: ignore[arg-type]
    assert (statuses, len(said)) == ([status], logged)


def test_a_request_that_comes_while_an_engine_ends_does_not_hide_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    statuses: list[int] = []
    said: list[str] = []
    monkeypatch.setattr(process.os, "_exit", statuses.append)
    monkeypatch.setattr(process._log, "exception", said.append)
    engine = Engine(make_config({"model": "fine", "block_size": 4}), FakeRunner())
    engine.stop()  # as run() does before it raises
    ours, theirs = socket.socketpair()
    with theirs:
        submit = Submit(key=0, prompt=[1], params=SamplingParams(), arrival=0.0)
        Frames[ToFront](ours, ToFront).send(submit)
        ours.close()
        process._read(Frames[ToEngine](theirs, ToEngine), engine)
    assert (statuses, said) == ([0], [])
