"""The sequence batcher: requests of one sequence meet one state, in order, and no other's."""

import itertools
import time
from collections.abc import Callable
from concurrent.futures import Future

import pytest
from tritonclient.utils import InferenceServerException

from tests.server.client import wait_until
from tests.server.features.calls import Caller, Reply, ints, settles
from tests.server.features.repository import IDLE_S

_ids = itertools.count(1000)


class Sequence:
    """A running sum on the server."""

    def __init__(self, caller: Caller, model: str) -> None:
        self._caller = caller
        self._model = model
        self._id = next(_ids)

    def send(self, value: int, **flags: bool) -> "Future[Reply]":
        """``start`` and ``end`` as the protocol knows them."""
        return self._caller.send_tensors(
            self._model,
            {"VALUE": ints(value)},
            sequence_id=self._id,
            **{f"sequence_{name}": flag for name, flag in flags.items()},
        )

    def add(self, value: int, **flags: bool) -> float:
        """The sum after this value."""
        return self.send(value, **flags).result().value("SUM")


@pytest.fixture
def start(caller: Caller) -> Callable[[str], Sequence]:
    """``start(model)``: a new sequence of its own id."""
    return lambda model: Sequence(caller, model)


def test_direct_interleaved_sequences_keep_apart(start: Callable[[str], Sequence]) -> None:
    """The model keeps one sum per row of the batch: the server gives each sequence its row."""
    one, other = start("direct"), start("direct")
    assert one.add(1, start=True) == 1
    assert other.add(100, start=True) == 100
    assert one.add(2) == 3
    assert other.add(200) == 300
    assert other.add(300) == 600
    assert one.add(3, end=True) == 6
    assert other.add(400, end=True) == 1000


def test_direct_a_sequence_waits_until_a_row_is_free(
    start: Callable[[str], Sequence], caller: Caller
) -> None:
    """Two rows, so the third sequence is in the backlog until one of the first two has ended."""
    one, other, third = (start("direct") for _ in range(3))
    assert one.add(1, start=True) == 1
    assert other.add(10, start=True) == 10
    waiting = [third.send(100, start=True)]
    wait_until(lambda: caller.pending("direct") == 1)
    waiting.append(third.send(100, end=True))
    time.sleep(0.3)
    assert not waiting[0].done()
    assert one.add(1, end=True) == 2
    assert [future.result().value("SUM") for future in waiting] == [100, 200]
    assert other.add(10, end=True) == 20


def test_direct_a_sequence_must_start(start: Callable[[str], Sequence]) -> None:
    with pytest.raises(InferenceServerException, match="START"):
        start("direct").add(1)


def test_oldest_sequences_share_an_execution_and_keep_apart(
    start: Callable[[str], Sequence], caller: Caller
) -> None:
    """The window is an hour and the preferred size 2: a request leaves with another sequence's."""
    before = caller.batches("oldest")
    one, other = start("oldest"), start("oldest")
    for value, flags in [(1, {"start": True}), (2, {}), (3, {"end": True})]:
        pair = [one.send(value, **flags), other.send(100 * value, **flags)]
        replies = [future.result() for future in pair]
        total = value * (value + 1) // 2
        assert [reply.value("SUM") for reply in replies] == [total, 100 * total]
        assert [reply.value("ROWS") for reply in replies] == [2, 2]
    settles(lambda: caller.batches("oldest") - before, {2: 3})


def test_oldest_never_puts_two_requests_of_a_sequence_into_one_execution(
    start: Callable[[str], Sequence], caller: Caller
) -> None:
    one, other = start("oldest"), start("oldest")
    early = [one.send(1, start=True)]
    wait_until(lambda: caller.pending("oldest") == 1)
    early.append(one.send(2, end=True))
    time.sleep(0.3)
    assert not any(future.done() for future in early)  # two are there, but of one sequence
    late = [other.send(10, start=True)]
    assert [early[0].result().value("SUM"), late[0].result().value("SUM")] == [1, 10]
    assert not early[1].done()
    assert other.add(20, end=True) == 30
    assert early[1].result().value("SUM") == 3


def test_a_silent_sequence_ends(start: Callable[[str], Sequence]) -> None:
    sequence = start("idle")
    assert sequence.add(1, start=True) == 1
    assert sequence.add(1) == 2
    time.sleep(1.5 * IDLE_S)
    with pytest.raises(InferenceServerException, match="START"):
        sequence.add(1)


def test_a_silent_sequence_gives_its_row_away(start: Callable[[str], Sequence]) -> None:
    """``idle`` has one row. The wait for it counts as the second one's own silence, and it may be
    over by then: hence only its first request is looked at."""
    silent, next_one = start("idle"), start("idle")
    assert silent.add(1, start=True) == 1
    began = time.monotonic()
    assert next_one.add(5, start=True) == 5
    assert time.monotonic() - began >= IDLE_S / 2
