"""Instance groups, and the rate limiter that shares resources between models."""

import itertools
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from tests.server.client import wait_until
from tests.server.features.calls import REPLY_S, Caller, Recorder, floats

RecorderOf = Callable[[str], Recorder]

LONG = 200_000.0
"""Rounds of ``onnx_pair``: seconds of computing."""


def test_two_instances_execute_at_the_same_time(caller: Caller, recorder: RecorderOf) -> None:
    log = recorder("pair")
    gate = log.gate()
    futures = [caller.send("pair", value, gate) for value in (1, 2, 3)]
    wait_until(lambda: len(log.executions()) == 2, REPLY_S)
    wait_until(lambda: caller.pending("pair") == 1)  # the third waits: there are only two
    running = log.executions()
    assert all(execution.end is None for execution in running)
    assert len({execution.instance for execution in running}) == 2
    log.open(gate)
    assert sorted(future.result().value("VALUE_OUT") for future in futures) == [1, 2, 3]


def test_two_onnx_instances_execute_at_the_same_time(caller: Caller) -> None:
    long = caller.send_tensors("onnx_pair", {"X": floats(LONG)})
    time.sleep(0.3)  # until it is being executed
    short = caller.send_tensors("onnx_pair", {"X": floats(1)})
    assert short.result().value("Y") == 1
    assert not long.done(), "the long request ended first: one instance, or LONG is too short"
    assert long.result().value("Y") == LONG


@pytest.fixture
def trickle(limited_caller: Caller) -> Iterator[None]:
    """A request every tenth of a second to a model that needs no resource.

    Once in some hundred times this server's rate limiter does not notice that a waiting instance
    could execute, until any other request comes.
    """
    done = threading.Event()
    futures = []

    def send() -> None:
        for value in itertools.count():
            if done.wait(0.1):
                return
            futures.append(limited_caller.send("free", value))

    thread = threading.Thread(target=send)
    thread.start()
    yield
    done.set()
    thread.join()
    for future in futures:
        future.result()


@pytest.mark.usefixtures("trickle")
def test_a_resource_keeps_two_models_apart(
    limited_caller: Caller, limited_recorder: RecorderOf
) -> None:
    one, other = limited_recorder("whole"), limited_recorder("seldom")
    gate = one.gate()
    first = limited_caller.send("whole", 1, gate)
    one.wait_for(1)
    second = limited_caller.send("seldom", 2)
    time.sleep(0.5)  # it would have been executed by now
    assert other.of(2) is None
    one.open(gate)
    first.result()
    second.result()
    before, after = one.of(1), other.of(2)
    assert before is not None
    assert before.end is not None
    assert after is not None
    assert after.start >= before.end


@pytest.mark.usefixtures("trickle")
def test_models_that_fit_the_resource_together_run_together(
    limited_caller: Caller, limited_recorder: RecorderOf
) -> None:
    one, other = limited_recorder("half"), limited_recorder("other_half")
    gates = one.gate(), other.gate()
    futures = [
        limited_caller.send("half", 1, gates[0]),
        limited_caller.send("other_half", 2, gates[1]),
    ]
    one.wait_for(1)
    other.wait_for(2)
    assert not one.has_ended(1)
    one.open(gates[0])
    other.open(gates[1])
    for future in futures:
        future.result()


@pytest.mark.usefixtures("trickle")
def test_the_rate_limiter_prefers_the_model_of_higher_priority(
    limited_caller: Caller, limited_recorder: RecorderOf
) -> None:
    """Priority 3 gets a third of the executions of priority 1, and is not starved."""
    holder, often, seldom = (limited_recorder(name) for name in ("half", "whole", "seldom"))
    gate = holder.gate()
    futures = [limited_caller.send("half", 100, gate)]
    holder.wait_for(100)
    values = list(range(1, 13))
    for value in values:
        futures += [limited_caller.send("seldom", value), limited_caller.send("whole", value)]
    wait_until(lambda: sum(map(limited_caller.pending, ("whole", "seldom"))) == 24, REPLY_S)
    holder.open(gate)
    for future in futures:
        future.result()
    executions = sorted(
        [(execution.start, "often") for execution in often.executions()]
        + [(execution.start, "seldom") for execution in seldom.executions()]
    )
    order = np.array([model for _, model in executions])
    assert len(order) == 24
    assert 7 <= np.count_nonzero(order[:12] == "often") <= 11
