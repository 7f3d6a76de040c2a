"""The channel closes once; a sweep tells of each cancellation once."""

import queue
import threading
import time
import weakref
from typing import Any

import numpy as np
import pytest
from jitney.errors import CancelledError, InternalError, InvalidArgumentError, UnavailableError
from jitney.frontend.channel import Channel, SendError
from jitney.frontend.replies import Arrival
from jitney.frontend.sweeper import sweep


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (InvalidArgumentError("no"), "INVALID_ARG", "INVALID_ARGUMENT: no"),
        (UnavailableError("full"), "UNAVAILABLE", "UNAVAILABLE: full"),
        (CancelledError("gone"), "CANCELLED", "CANCELLED: gone"),
    ],
)
def test_errors_carry_the_servers_code_and_begin_with_its_name(
    pb: Any, error: Any, code: str, text: str
) -> None:
    sender = pb.Sender()
    Channel(sender).fail(error)
    (response,) = sender.sent
    assert response.error.code == getattr(pb.TritonError, code)
    assert response.error.text == text
    assert sender.final == 1


def test_the_server_is_never_asked_during_or_after_the_final_response(pb: Any) -> None:
    """The server crashes if it is."""

    class Strict(pb.Sender):  # type: ignore[misc, name-defined]
        asking = ending = False

        def is_cancelled(self) -> bool:
            assert not self.ending
            self.asking = True
            time.sleep(0.001)
            self.asking = False
            return False

        def send(self, response: Any = None, flags: int = 0) -> None:
            self.ending = flags == 1
            assert not (self.ending and self.asking)
            time.sleep(0.001)

    errors: list[BaseException] = []

    def ask(channel: Channel) -> None:
        try:
            while not channel.closed:
                channel.is_cancelled()
            assert not channel.is_cancelled()
        except AssertionError as error:
            errors.append(error)

    for _ in range(20):
        channel = Channel(Strict())
        thread = threading.Thread(target=ask, args=(channel,))
        thread.start()
        time.sleep(0.0015)
        channel.send([], final=True)
        thread.join(60)
    assert errors == []


def test_large_final_data_goes_before_the_final_flag(pb: Any) -> None:
    for size, responses in ((100, 1), (100_000, 1)):
        sender = pb.Sender()
        ends: list[bool] = []
        sender.on_send = lambda response, ends=ends, sender=sender: ends.append(sender.closed)
        channel = Channel(sender)
        channel.send([("text_output", np.array([b"x" * size], object))], final=True)
        assert (len(sender.sent), sender.final, channel.closed) == (responses, 1, True)
        assert ends == ([True] if size == 100 else [False, True])


@pytest.mark.parametrize("final", [False, True])
def test_a_failed_send_is_a_cancellation_only_if_the_client_has_gone(pb: Any, final: bool) -> None:
    data = [("text_output", np.array([b"x" * 100_000], object))]
    sender = pb.Sender()
    sender.memory = 1000
    channel = Channel(sender)
    with pytest.raises(SendError):
        channel.send(data, final=final)
    channel.fail(InternalError("a response could not be sent"))  # it can still be answered
    assert [each.error.text for each in sender.sent] == ["INTERNAL: a response could not be sent"]
    assert sender.final == 1
    gone = pb.Sender()
    gone.memory, gone.cancelled = 1000, True
    channel = Channel(gone)
    with pytest.raises(CancelledError):
        channel.send(data, final=final)
    assert channel.closed
    assert (gone.sent, gone.final) == ([], 1)


@pytest.mark.parametrize("final", [False, True])
def test_an_error_gets_the_memory_of_the_response_that_could_not_be_sent(
    pb: Any, final: bool
) -> None:
    """Some of its tensors may have found room."""

    class Pool(pb.Sender):  # type: ignore[misc, name-defined]
        held: Any = staticmethod(lambda: None)

        def send(self, response: Any = None, flags: int = 0) -> None:
            if self.held() is not None:
                raise pb.TritonModelException("No space left on device")
            if response is not None and response.error is None:
                self.held = weakref.ref(response)
                raise pb.TritonModelException("No space left on device")
            super().send(response, flags)

    sender = Pool()
    channel = Channel(sender)
    data = [("text_output", np.array([b"x" * 100_000], object))]
    try:
        channel.send(data, final=final)
    except SendError as error:
        channel.fail(error)  # while the error is being handled, as the responder does it
    assert [each.error.text for each in sender.sent] == ["INTERNAL: a response could not be sent"]
    assert sender.final == 1


def test_the_flag_of_a_large_final_response_gets_the_memory_of_its_data(pb: Any) -> None:
    class Pool(pb.Sender):  # type: ignore[misc, name-defined]
        held: Any = staticmethod(lambda: None)

        def send(self, response: Any = None, flags: int = 0) -> None:
            if self.held() is not None:
                raise pb.TritonModelException("No space left on device")
            if response is not None:
                self.held = weakref.ref(response)
            super().send(response, flags)

    sender = Pool()
    sent: list[int] = []
    sender.on_send = lambda response: sent.append(0 if response is None else 1)
    sender.sent = _Forgetful()
    Channel(sender).send([("text_output", np.array([b"x" * 100_000], object))], final=True)
    assert sent == [1, 0]
    assert sender.final == 1


class _Forgetful(list):  # type: ignore[type-arg]
    """Keeps nothing."""

    def append(self, item: object) -> None:
        pass


def test_without_room_the_server_is_not_asked(pb: Any, shared_memory: Any) -> None:
    """The question would end the stub."""

    class Fatal(pb.Sender):  # type: ignore[misc, name-defined]
        def is_cancelled(self) -> bool:
            assert shared_memory.has_room
            return True

    channel = Channel(Fatal())
    shared_memory.set_room(False)
    assert not channel.is_cancelled()
    shared_memory.set_room(True)
    assert channel.is_cancelled()


def watch(*senders: Any) -> "queue.SimpleQueue[Arrival]":
    """As the service does it; the keys are the indices."""
    watched: queue.SimpleQueue[Arrival] = queue.SimpleQueue()
    for key, sender in enumerate(senders):
        watched.put(Arrival(key, Channel(sender), at=0.0, deadline=None))
    return watched


def test_a_question_that_fails_does_not_end_the_sweeps(pb: Any) -> None:
    class Mute(pb.Sender):  # type: ignore[misc, name-defined]
        def is_cancelled(self) -> bool:
            raise pb.TritonModelException("no answer")

    gone = pb.Sender()
    gone.cancelled = True
    assert list(sweep(watch(Mute(), gone))) == [1]


def test_a_question_that_raises_anything_else_holds_up_the_others_once(pb: Any) -> None:
    class Odd(pb.Sender):  # type: ignore[misc, name-defined]
        def is_cancelled(self) -> bool:
            raise ZeroDivisionError

    gone = pb.Sender()
    gone.cancelled = True
    watched = watch(Odd(), gone)
    with pytest.raises(ZeroDivisionError):
        list(sweep(watched))
    assert list(sweep(watched)) == [1]


def test_a_sweep_tells_once_and_forgets_what_is_closed(pb: Any) -> None:
    senders = [pb.Sender() for _ in range(3)]
    watched = watch(*senders)
    assert list(sweep(watched)) == []
    senders[0].cancelled = senders[2].cancelled = True
    ended = watched.get()
    watched.put(ended)
    ended.channel.send([], final=True)
    assert list(sweep(watched)) == [2]
    assert list(sweep(watched)) == []
    assert watched.qsize() == 1
