"""The response cache: the second request of the same content is answered without the model."""

from collections.abc import Callable

from tests.server.features.calls import Caller, Recorder, floats, settles


def test_the_model_is_not_executed_again(
    limited_caller: Caller, limited_recorder: Callable[[str], Recorder]
) -> None:
    log = limited_recorder("cached")
    replies = [limited_caller.send("cached", value).result() for value in (5, 5, 5, 6)]
    assert [reply.value("VALUE_OUT") for reply in replies] == [5, 5, 5, 6]
    assert log.order() == [5, 6]
    settles(lambda: limited_caller.cache_hits("cached"), 2)
    settles(lambda: limited_caller.count("cached", "execution_count"), 2)


def test_an_onnx_model_is_not_executed_again(limited_caller: Caller) -> None:
    values = [1.5, 1.5, 1.5, 2.5]
    replies = [
        limited_caller.send_tensors("onnx_cached", {"X": floats(value)}).result()
        for value in values
    ]
    assert [reply.value("Y") for reply in replies] == [10.5, 10.5, 10.5, 17.5]
    settles(lambda: limited_caller.cache_hits("onnx_cached"), 2)
    settles(lambda: limited_caller.count("onnx_cached", "execution_count"), 2)
