"""The channel closes once; the sweeper tells of each cancellation once."""

import threading
import time
from typing import Any

import pytest
from jitney.errors import CancelledError, InvalidArgumentError, UnavailableError
from jitney.frontend.channel import Channel
from jitney.frontend.sweeper import Sweeper
from jitney.messages import Cancel


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


def test_a_question_that_fails_does_not_end_the_sweeps(pb: Any) -> None:
    class Mute(pb.Sender):  # type: ignore[misc, name-defined]
        def is_cancelled(self) -> bool:
            raise pb.TritonModelException("no answer")

    told: list[Cancel] = []
    sweeper = Sweeper(told.append, 0.05)
    gone = pb.Sender()
    gone.cancelled = True
    sweeper.watch(0, Channel(Mute()))
    sweeper.watch(1, Channel(gone))
    sweeper.sweep()
    assert told == [Cancel(1)]


def test_the_sweeper_tells_once_and_forgets_what_is_closed(pb: Any) -> None:
    told: list[Cancel] = []
    sweeper = Sweeper(told.append, 0.05)
    senders = [pb.Sender() for _ in range(3)]
    channels = [Channel(sender) for sender in senders]
    for key, channel in enumerate(channels):
        sweeper.watch(key, channel)
    sweeper.sweep()
    assert told == []
    senders[0].cancelled = senders[2].cancelled = True
    channels[2].send([], final=True)
    sweeper.sweep()
    sweeper.sweep()
    assert told == [Cancel(0)]
