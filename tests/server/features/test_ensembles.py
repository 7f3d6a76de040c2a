"""An ensemble: the server leads each request through several models, and each batches by itself."""

from tests.server.features.calls import Caller, floats, settles

STEPS = ("onnx_by_six", "onnx_by_rows")


def test_an_ensemble_runs_its_steps_and_the_second_batches(caller: Caller) -> None:
    before = {step: caller.batches(step) for step in STEPS}
    futures = [caller.send_tensors("two_steps", {"X": floats(value)}) for value in (1, 2, 3, 4)]
    assert [future.result().value("Y") for future in futures] == [24, 48, 72, 96]
    settles(lambda: caller.batches("onnx_by_six") - before["onnx_by_six"], {1: 4})
    settles(lambda: caller.batches("onnx_by_rows") - before["onnx_by_rows"], {4: 1})
