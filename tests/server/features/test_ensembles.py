"""An ensemble: the server leads each request through several models, and each batches by itself."""

from tests.server.features.calls import Caller, floats, settles

STEPS = ("onnx_by_six", "onnx_by_five")


def test_an_ensemble_runs_its_steps_and_the_second_batches(caller: Caller) -> None:
    before = {step: caller.batches(step) for step in STEPS}
    futures = [caller.send_tensors("thirty", {"X": floats(value)}) for value in (1, 2, 3, 4)]
    assert [future.result().value("Y") for future in futures] == [30, 60, 90, 120]
    settles(lambda: caller.batches("onnx_by_six") - before["onnx_by_six"], {1: 4})
    settles(lambda: caller.batches("onnx_by_five") - before["onnx_by_five"], {4: 1})


def test_no_tensor_but_the_ensembles_own_is_answered(caller: Caller) -> None:
    futures = [caller.send_tensors("thirty", {"X": floats(1)}) for _ in range(4)]
    assert {name for future in futures for name in future.result().outputs} == {"Y"}
