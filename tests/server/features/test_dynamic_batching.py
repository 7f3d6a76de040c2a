"""The dynamic batcher: the window, preferred sizes, and answers in the order of the requests."""

import time
from collections.abc import Callable

from tests.server.client import wait_until
from tests.server.features.calls import REPLY_S, Caller, Recorder, floats, settles
from tests.server.features.repository import DELAY_S

RecorderOf = Callable[[str], Recorder]
INFERENCES = "inference_count"


def test_the_window_gathers_requests_into_one_execution(
    caller: Caller, recorder: RecorderOf
) -> None:
    log, inferences, batches = (
        recorder("full"),
        caller.count("full", INFERENCES),
        caller.batches("full"),
    )
    futures = [*caller.send_in_order("full", [1, 2, 3]), caller.send("full", 4)]
    replies = [future.result() for future in futures]
    assert [reply.value("VALUE_OUT") for reply in replies] == [1, 2, 3, 4]  # each got its own
    assert [reply.value("ROWS") for reply in replies] == [4, 4, 4, 4]
    settles(lambda: caller.count("full", INFERENCES) - inferences, 4)
    settles(lambda: caller.batches("full") - batches, {4: 1})  # one execution, of 4 rows
    assert len(log.executions()) == 1


def test_a_request_of_several_rows_counts_as_many(caller: Caller, recorder: RecorderOf) -> None:
    log, before = recorder("full"), caller.batches("full")
    three = caller.queued("full", caller.send_rows, [11, 12, 13])
    one = caller.send("full", 14)
    assert three.result().outputs["VALUE_OUT"].ravel().tolist() == [11, 12, 13]
    assert one.result().value("ROWS") == 4
    settles(lambda: caller.batches("full") - before, {4: 1})
    assert log.order() == [11, 12, 13, 14]


def test_a_lone_request_waits_for_the_window(caller: Caller, recorder: RecorderOf) -> None:
    log = recorder("delay")
    sent = time.monotonic()
    assert caller.send("delay", 1).result().value("ROWS") == 1
    execution = log.of(1)
    assert execution is not None
    assert execution.start - sent >= DELAY_S


def test_a_preferred_size_leaves_at_once(caller: Caller) -> None:
    """Although the window is an hour and 8 rows would fit."""
    before = caller.batches("preferred")
    futures = [caller.send("preferred", value) for value in range(1, 5)]
    assert [future.result().value("ROWS") for future in futures] == [4, 4, 4, 4]
    settles(lambda: caller.batches("preferred") - before, {4: 1})


def test_a_backlog_leaves_in_preferred_sizes(caller: Caller, recorder: RecorderOf) -> None:
    """Rather than in one batch of 8. This server puts one row more than it should into a batch of
    a preferred size if more rows are waiting: 5 and 3 instead of 4 and 4."""
    log = recorder("preferred")
    gate = log.gate()
    futures = [caller.send("preferred", value, gate) for value in range(1, 5)]
    log.wait_for(1)
    futures += caller.send_in_order("preferred", list(range(5, 13)))
    log.open(gate)
    log.wait_for(8)
    second = log.executions()[1].values
    assert second in ([5, 6, 7, 8], [5, 6, 7, 8, 9])
    if len(second) == 5:  # the three that are left wait for a fourth
        futures.append(caller.send("preferred", 13))
    assert {future.result().value("ROWS") for future in futures} == {4, len(second)}


def test_answers_keep_the_order_of_the_requests(caller: Caller, recorder: RecorderOf) -> None:
    log = recorder("ordered")
    gate = log.gate()
    slow = caller.send("ordered", 1, gate)
    log.wait_for(1)
    fast = caller.send("ordered", 2)
    wait_until(lambda: log.has_ended(2), REPLY_S)
    time.sleep(0.3)  # more than enough for an answer that nothing holds back
    assert not log.has_ended(1)
    assert not fast.done()
    log.open(gate)
    slow.result()
    overtaken = log.of(1)
    assert overtaken is not None
    assert overtaken.end is not None
    assert fast.result().at >= overtaken.end


def test_onnx_requests_share_an_execution(caller: Caller) -> None:
    inferences, batches = caller.count("onnx_by_rows", INFERENCES), caller.batches("onnx_by_rows")
    send, tensors = caller.send_tensors, [{"X": floats(value)} for value in (1, 2, 3, 4)]
    futures = [caller.queued("onnx_by_rows", send, tensor) for tensor in tensors[:3]]
    futures.append(send("onnx_by_rows", tensors[3]))
    # The model multiplies by the rows that it was given at once: not the server alone batches.
    assert [future.result().value("Y") for future in futures] == [4, 8, 12, 16]
    settles(lambda: caller.count("onnx_by_rows", INFERENCES) - inferences, 4)
    settles(lambda: caller.batches("onnx_by_rows") - batches, {4: 1})
