"""Joining and dividing: one run for a batch, one copy in, none out."""

from collections.abc import Sequence

import numpy as np
import pytest
from jitney.errors import InternalError, InvalidArgumentError, JitneyError
from jitney_server.standins.batch import BatchArrays, Batcher, ModelRequest, OnDevice
from jitney_server.standins.signature import Signature, TensorInfo

SIGNATURE = Signature(
    (TensorInfo("x", "TYPE_FP32", (-1, -1), ("n", "m")),),
    (
        TensorInfo("twice", "TYPE_FP32", (-1, -1), ("n", "m")),
        TensorInfo("label", "TYPE_STRING", (-1, 2, -1), ("n", None, None)),
    ),
)


class Model:
    """Doubles ``x`` and remembers its calls. Refuses any batch with a NaN in it."""

    def __init__(self) -> None:
        self.calls: list[tuple[BatchArrays, list[str]]] = []
        self.rows = 0  # more rows than there should be

    def __call__(self, inputs: BatchArrays, outputs: Sequence[str]) -> list[np.ndarray]:
        self.calls.append((inputs, list(outputs)))
        x = inputs["x"]
        assert isinstance(x, np.ndarray)
        if np.isnan(x).any():
            raise InvalidArgumentError("x is not a number")
        twice = np.concatenate([2 * x, x[: self.rows]])
        label = np.full((len(x), 2, 1), "bus", object)
        return [{"twice": twice, "label": label}[name] for name in outputs]


@pytest.fixture
def model() -> Model:
    return Model()


def work(*rows: list[float], outputs: tuple[str, ...] = ("twice",)) -> ModelRequest:
    return ModelRequest({"x": np.array(rows, np.float32)}, outputs)


def arrays(answer: BatchArrays | JitneyError) -> dict[str, list[object]]:
    assert isinstance(answer, dict), answer
    return {name: np.asarray(array).tolist() for name, array in answer.items()}


def test_one_run_and_views(model: Model) -> None:
    made = Batcher(model, SIGNATURE, True).execute([work([1]), work([2], [3]), work([4])])
    assert [arrays(answer) for answer in made] == [
        {"twice": [[2]]}, {"twice": [[4], [6]]}, {"twice": [[8]]}
    ]  # fmt: skip
    assert len(model.calls) == 1
    bases = {id(answer["twice"].base) for answer in made}  # type: ignore[index, union-attr]
    assert len(bases) == 1, "the outputs are views of one array"


def test_a_single_request_is_not_copied(model: Model) -> None:
    one = work([1, 2])
    Batcher(model, SIGNATURE, True).execute([one])
    assert model.calls[0][0]["x"] is one.inputs["x"]


def test_a_failed_batch_is_run_one_by_one(model: Model) -> None:
    made = Batcher(model, SIGNATURE, True).execute([work([1]), work([np.nan]), work([3])])
    assert arrays(made[0]) == {"twice": [[2]]}
    assert isinstance(made[1], InvalidArgumentError)
    assert arrays(made[2]) == {"twice": [[6]]}
    assert len(model.calls) == 4


def test_inputs_with_different_rows_fail_alone(model: Model) -> None:
    signature = Signature((*SIGNATURE.inputs, SIGNATURE.inputs[0]._replace(name="z")), ())
    odd = ModelRequest({"x": np.zeros((2, 1)), "z": np.zeros((1, 1))}, ())
    good = ModelRequest({"x": np.zeros((1, 1)), "z": np.zeros((1, 1))}, ())
    made = Batcher(model, signature, True).execute([odd, good])
    assert isinstance(made[0], InvalidArgumentError)
    assert "x [2, 1], z [1, 1]" in str(made[0])
    assert made[1] == {}


def test_an_output_of_other_rows_is_named(model: Model) -> None:
    model.rows = 1
    made = Batcher(model, SIGNATURE, True).execute([work([1]), work([2])])
    assert all(isinstance(answer, InternalError) for answer in made)
    assert "output 'twice' has shape [3, 1] for a batch of 2 rows" in str(made[0])


class OnFakeDevice:
    """A tensor that is not on the host."""

    def __init__(self, array: np.ndarray) -> None:
        self._array = array

    @property
    def shape(self) -> tuple[int, ...]:
        return self._array.shape

    def numpy(self) -> np.ndarray:
        return self._array


def test_a_scalar_is_a_vector_of_one_wherever_it_is() -> None:
    vector = OnFakeDevice(np.ones(2))

    def run(inputs: BatchArrays, outputs: Sequence[str]) -> list[np.ndarray | OnDevice]:
        return [np.array(3), OnFakeDevice(np.array(4)), vector]

    request = ModelRequest({}, ("on_host", "on_device", "vector"))
    (answer,) = Batcher(run, SIGNATURE, False).execute([request])
    assert isinstance(answer, dict)
    assert answer.pop("vector") is vector, "what is no scalar stays on the device"
    assert arrays(answer) == {"on_host": [3], "on_device": [4]}


def test_no_rows_at_all_need_no_run(model: Model) -> None:
    empty = ModelRequest({"x": np.empty((0, 5), np.float32)}, ("twice", "label"))
    (made,) = Batcher(model, SIGNATURE, True).execute([empty])
    assert model.calls == []
    assert isinstance(made, dict)
    assert made["twice"].shape == (0, 5)
    assert made["label"].shape == (0, 2, 0)
    assert made["label"].dtype == np.object_  # type: ignore[union-attr]
