"""Batches, queues, instances, the rate limiter and the response cache: which requests the server
gives to a model together, in which order, and which not at all."""

import time

import pytest
from tritonclient.utils import InferenceServerException

from tests.server.client import wait_until
from tests.server.features.calls import REPLY_S, Caller
from tests.server.features.repository import TIMEOUT_S


@pytest.mark.parametrize("model", ["full", "preferred"])
def test_requests_share_an_execution(caller: Caller, model: str) -> None:
    """The window is an hour: only a full or a preferred batch, of 4 rows, leaves before."""
    log = caller.log(model)
    replies = [future.result() for future in [caller.send(model, value) for value in range(4)]]
    assert [reply.value() for reply in replies] == [0, 1, 2, 3]  # each got its own
    assert [reply.value("ROWS") for reply in replies] == [4, 4, 4, 4]
    assert len(log.events("start")) == 1


def test_answers_keep_the_order_of_the_requests(caller: Caller) -> None:
    log = caller.log("ordered")
    slow = caller.send("ordered", 1, log.gate())
    log.wait_for(1)
    fast = caller.send("ordered", 2)
    log.wait_for(2, "end")
    time.sleep(0.3)  # more than enough for an answer that nothing holds back
    assert not fast.done()
    log.open_all()
    assert [slow.result().value(), fast.result().value()] == [1, 2]
    assert log.order("end") == [2, 1]


def test_high_priority_overtakes(caller: Caller) -> None:
    log = caller.block("priorities")
    futures = caller.send_in_order("priorities", [2, 3, 4])  # the default level, 2
    futures += caller.send_in_order("priorities", [5, 6], priority=1)
    log.open_all()
    for future in futures:
        future.result()
    assert log.order() == [1, 5, 6, 2, 3, 4]


def test_a_full_queue_refuses(caller: Caller) -> None:
    log = caller.block("limited")
    queued = caller.send_in_order("limited", [2, 3])
    with pytest.raises(InferenceServerException, match="Exceeds maximum queue size"):
        caller.send("limited", 4).result()
    log.open_all()
    assert [future.result().value() for future in queued] == [2, 3]
    assert log.order() == [1, 2, 3]


def test_a_request_that_waited_too_long_is_rejected(caller: Caller) -> None:
    log = caller.block("reject")
    sent = time.monotonic()
    with pytest.raises(InferenceServerException, match="Request timeout expired"):
        caller.send("reject", 2).result()  # although the model is still busy
    assert time.monotonic() - sent >= TIMEOUT_S
    log.open_all()
    assert caller.send("reject", 3).result().value() == 3
    assert log.order() == [1, 3]


def test_two_instances_execute_at_the_same_time(caller: Caller) -> None:
    log = caller.log("pair")
    gate = log.gate()
    futures = [caller.send("pair", value, gate) for value in (1, 2, 3)]
    wait_until(lambda: len(log.events("start")) == 2, REPLY_S)
    wait_until(lambda: caller.pending("pair") == 1)  # the third waits: there are only two
    assert log.events("end") == []
    assert len({event["instance"] for event in log.events("start")}) == 2
    log.open_all()
    assert [future.result().value() for future in futures] == [1, 2, 3]


def test_a_resource_keeps_two_models_apart(limited_caller: Caller) -> None:
    one, other = limited_caller.block("one"), limited_caller.log("other")
    second = limited_caller.send("other", 2)
    time.sleep(0.5)  # it would have been executed by now
    assert other.order() == []
    one.open_all()
    # Once in some hundred times this server's rate limiter does not notice that a waiting instance
    # could execute, until any other request comes.
    while not second.done():
        limited_caller.send("free", 0).result()
        time.sleep(0.1)
    assert second.result().value() == 2
    (before,), (after,) = one.events("end"), other.events("start")
    assert after["at"] >= before["at"]


def test_equal_requests_are_answered_by_the_cache(limited_caller: Caller) -> None:
    log = limited_caller.log("cached")
    replies = [limited_caller.send("cached", value).result() for value in (5, 5, 5, 6)]
    assert [reply.value() for reply in replies] == [5, 5, 5, 6]
    assert log.order() == [5, 6]
