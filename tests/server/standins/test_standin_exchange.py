"""Requests in, responses out, with a stand-in for the server's own module."""

import gc
import logging
import types
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from jitney.errors import InvalidArgumentError, JitneyError
from jitney_server.standins.batch import BatchArrays, Batcher, ModelRequest
from jitney_server.standins.exchange import answer
from jitney_server.standins.signature import Signature

from tests.backend_utils import InferenceResponse, Tensor, TritonError, put_into


class Broken(Tensor):
    def as_numpy(self) -> Any:
        raise RuntimeError("bytes of /srv/secret that are no tensor")


class Unsendable(Tensor):
    """The server's own class, where it has no memory left for complex numbers."""

    def __init__(self, name: str, array: np.ndarray) -> None:
        super().__init__(name, array)
        if array.dtype == np.complex64:
            raise RuntimeError("no room in /dev/shm/secret")


SERVER = put_into(types.SimpleNamespace())
SERVER.Tensor = Unsendable
FAILED = (TritonError.INTERNAL, "INTERNAL: the model failed; the server's log says why")


def request(tensor: Tensor) -> Any:
    return types.SimpleNamespace(inputs=lambda: [tensor], requested_output_names=lambda: ["y"])


def requests(*numbers: int) -> list[Any]:
    return [request(Tensor("x", np.array([number]))) for number in numbers]


def said(responses: Sequence[InferenceResponse]) -> list[Any]:
    return [
        (made.error.code, made.error.text) if made.error else made.tensors["y"].tolist()
        for made in responses
    ]


def run(execute: Callable[[Sequence[ModelRequest]], list[Any]], asked: list[Any]) -> list[Any]:
    def adopt(name: str, tensor: Any) -> Any:
        raise AssertionError("nothing is on a GPU")

    return said(answer(SERVER, asked, execute, adopt))


def double(works: Sequence[ModelRequest]) -> list[BatchArrays | JitneyError]:
    return [{"y": 2 * np.asarray(work.inputs["x"])} for work in works]


def test_answers_keep_the_order_and_errors_their_code() -> None:
    def execute(works: Sequence[ModelRequest]) -> list[BatchArrays | JitneyError]:
        made = double(works)
        return [made[0], InvalidArgumentError("x is odd"), *made[2:]]

    assert run(execute, requests(1, 2, 3)) == [
        [2],
        (TritonError.INVALID_ARG, "INVALID_ARGUMENT: x is odd"),
        [6],
    ]


def test_a_request_that_cannot_be_read_fails_alone(caplog: pytest.LogCaptureFixture) -> None:
    good = requests(1, 2)
    broken = request(Broken("x", np.zeros(1)))
    assert run(double, [good[0], broken, good[1]]) == [[2], FAILED, [4]]
    assert "/srv/secret" in caplog.text, "the whole reason is in the log"


def test_an_answer_that_cannot_be_sent_fails_alone(caplog: pytest.LogCaptureFixture) -> None:
    def execute(works: Sequence[ModelRequest]) -> list[BatchArrays | JitneyError]:
        return [{"y": np.zeros(1, np.complex64)}, *double(works)[1:]]

    assert run(execute, requests(1, 2)) == [FAILED, [4]]
    assert "/dev/shm/secret" in caplog.text


@pytest.mark.parametrize("wrong", ["raises", "answers too few"])
def test_a_bug_of_ours_tells_nothing_of_this_machine(
    wrong: str, caplog: pytest.LogCaptureFixture
) -> None:
    def execute(works: Sequence[ModelRequest]) -> list[BatchArrays | JitneyError]:
        if wrong == "raises":
            raise RuntimeError("in /srv/secret")
        return []

    assert run(execute, requests(1, 2)) == [FAILED, FAILED]
    assert "a batch of 2 requests failed" in caplog.text


@pytest.mark.parametrize("batching", [False, True])
def test_the_inputs_of_requests_that_fail_are_let_go_at_once(batching: bool) -> None:
    """They are in the server's shared memory. The garbage collector may come much later."""

    def refuse(inputs: BatchArrays, outputs: Sequence[str]) -> list[np.ndarray]:
        raise InvalidArgumentError("x is odd")

    batcher = Batcher(refuse, Signature((), ()), batching)
    tensors = [Tensor("x", np.array([number])) for number in (1, 2)]
    kept = [weakref.ref(tensor) for tensor in tensors]
    logging.disable()  # the test's own handler would keep what is logged, errors among it
    gc.disable()
    try:
        odd = (TritonError.INVALID_ARG, "INVALID_ARGUMENT: x is odd")
        assert run(batcher.execute, [request(tensor) for tensor in tensors]) == [odd, odd]
        del tensors
        assert [each() for each in kept] == [None, None]
    finally:
        gc.enable()
        logging.disable(logging.NOTSET)
