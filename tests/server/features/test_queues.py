"""The server's queue: priority levels, its limit, and requests that have waited too long.

Every model here executes one row at a time. The first request holds it behind a gate while the
others queue up.
"""

import time
from collections.abc import Callable
from concurrent.futures import Future

import pytest
from tritonclient.utils import InferenceServerException

from tests.server.client import wait_until
from tests.server.features.calls import REPLY_S, Caller, Recorder, Reply
from tests.server.features.repository import TIMEOUT_S

SHORT_US = 50_000
EXPIRED = "Request timeout expired"
FULL = "Exceeds maximum queue size"


class Blocked:
    """A model that is busy with the request of value 1 until :meth:`release`."""

    def __init__(self, caller: Caller, log: Recorder, model: str) -> None:
        self.log = log
        self._gate = log.gate()
        self._first = caller.send(model, 1, self._gate)
        log.wait_for(1)

    def release(self) -> None:
        """Let the first request end, and wait for it."""
        self.log.open(self._gate)
        self._first.result()


@pytest.fixture
def block(caller: Caller, recorder: Callable[[str], Recorder]) -> Callable[[str], Blocked]:
    """``block(model)``: the model, busy."""
    return lambda model: Blocked(caller, recorder(model), model)


def _error(future: "Future[Reply]") -> str:
    """The text of the error that must come."""
    with pytest.raises(InferenceServerException) as caught:
        future.result(REPLY_S)
    return str(caught.value)


def test_high_priority_overtakes(caller: Caller, block: Callable[[str], Blocked]) -> None:
    blocked = block("priorities")
    low = caller.send_in_order("priorities", [2, 3, 4])  # the default level, 2
    high = caller.send_in_order("priorities", [5, 6], priority=1)
    blocked.release()
    for future in low + high:
        future.result()
    assert blocked.log.order() == [1, 5, 6, 2, 3, 4]


def test_a_priority_beyond_the_levels_is_the_default(
    caller: Caller, block: Callable[[str], Blocked]
) -> None:
    blocked = block("priorities")
    beyond = caller.send_in_order("priorities", [12, 13], priority=9)
    high = caller.send_in_order("priorities", [14], priority=1)
    blocked.release()
    for future in beyond + high:
        future.result()
    assert blocked.log.order()[-3:] == [14, 12, 13]


def test_a_full_queue_refuses(caller: Caller, block: Callable[[str], Blocked]) -> None:
    blocked = block("limited")
    queued = caller.send_in_order("limited", [2, 3])
    assert FULL in _error(caller.send("limited", 4))
    blocked.release()
    assert [future.result().value("VALUE_OUT") for future in queued] == [2, 3]
    assert blocked.log.order() == [1, 2, 3]
    assert caller.send("limited", 5).result().value("VALUE_OUT") == 5  # there is room again


def test_a_limit_of_one_level_leaves_the_other_alone(
    caller: Caller, block: Callable[[str], Blocked]
) -> None:
    blocked = block("priorities")
    low = caller.send_in_order("priorities", [2, 3, 4])
    assert FULL in _error(caller.send("priorities", 5))
    high = caller.send_in_order("priorities", [6], priority=1)
    blocked.release()
    for future in low + high:
        future.result()
    assert blocked.log.order() == [1, 6, 2, 3, 4]


def test_a_request_that_waited_too_long_is_rejected(
    caller: Caller, block: Callable[[str], Blocked]
) -> None:
    blocked = block("reject")
    sent = time.monotonic()
    assert EXPIRED in _error(caller.send("reject", 2))  # although the model is still busy
    assert time.monotonic() - sent >= TIMEOUT_S
    blocked.release()
    assert caller.send("reject", 3).result().value("VALUE_OUT") == 3
    assert blocked.log.order() == [1, 3]  # 2 was never executed


def test_a_request_that_waited_too_long_is_delayed(
    caller: Caller, block: Callable[[str], Blocked]
) -> None:
    blocked = block("late")
    late = caller.send_in_order("late", [2], timeout=SHORT_US)
    in_time = caller.send_in_order("late", [3, 4])
    time.sleep(3 * SHORT_US / 1e6)
    blocked.release()
    for future in late + in_time:
        future.result()
    assert blocked.log.order() == [1, 3, 4, 2]


def test_a_request_may_shorten_its_timeout_where_that_is_allowed(
    caller: Caller, block: Callable[[str], Blocked]
) -> None:
    blocked = block("override")
    assert EXPIRED in _error(caller.send("override", 2, timeout=SHORT_US))
    patient = caller.send_in_order("override", [3])
    blocked.release()
    assert patient[0].result().value("VALUE_OUT") == 3
    assert blocked.log.order() == [1, 3]


@pytest.mark.parametrize("model", ["no_override", "no_default"])
def test_elsewhere_its_timeout_has_no_effect(
    caller: Caller, block: Callable[[str], Blocked], model: str
) -> None:
    """``no_default`` allows the override, but its own timeout is 0, which switches timeouts off."""
    blocked = block(model)
    hurried = caller.send_in_order(model, [2], timeout=SHORT_US)
    time.sleep(3 * SHORT_US / 1e6)
    blocked.release()
    assert hurried[0].result().value("VALUE_OUT") == 2
    wait_until(lambda: blocked.log.order() == [1, 2])
