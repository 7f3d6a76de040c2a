"""The queue of replies: when the next response may leave. The clock is the test's."""

from types import SimpleNamespace
from typing import Any

import pytest
from jitney.frontend import replies
from jitney.frontend.replies import MAX_BURST, MAX_PAUSE_S, MAX_WAIT_S, SendQueue

SEND_S = 0.001


class Clock:
    """In place of the module ``time``."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


class Replies:
    """A queue, and sends that take ``SEND_S``."""

    def __init__(self, clock: Clock, share: float) -> None:
        self.queue = SendQueue(share)
        self._clock = clock

    def wait(self, count: int, urgent: bool = False) -> None:
        """So many further replies have something to send."""
        for key in range(count):
            reply: Any = SimpleNamespace(key=(urgent, key), is_urgent=urgent, queued_at=0.0)
            self.queue.put(reply)

    def send(self, seconds: float = SEND_S) -> None:
        self.queue.pop()
        began = self._clock.now
        self._clock.now += seconds
        self.queue.note_sent(began, self._clock.now)

    def send_all(self) -> int:
        """Send for as long as one may. Returns how many were sent."""
        count = 0
        while self.queue.may_send:
            self.send()
            count += 1
        return count


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(replies, "time", made)
    return made


@pytest.mark.parametrize("streams", [1, 5, MAX_BURST, 2 * MAX_BURST])
@pytest.mark.parametrize("share", [0.2, 0.5, 1.0])
def test_sends_keep_to_their_share_and_leave_in_bursts(
    clock: Clock, share: float, streams: int
) -> None:
    replies = Replies(clock, share)
    began = clock.now
    bursts = []
    while sum(bursts) < 20 * streams:
        replies.wait(streams)
        bursts.append(replies.send_all())
        replies.wait(streams)
        clock.now += replies.queue.seconds_to_next() + 1e-9
    if share < 1.0:  # else there are no pauses
        assert set(bursts) == {min(streams, MAX_BURST)}
    assert sum(bursts) * SEND_S / (clock.now - began) == pytest.approx(share, rel=0.01)


def test_an_urgent_reply_does_not_wait_for_the_end_of_a_pause(clock: Clock) -> None:
    replies = Replies(clock, share=0.1)
    replies.wait(3)
    assert replies.send_all() == 3
    replies.wait(2)
    pause = replies.queue.seconds_to_next()
    assert pause == pytest.approx(3 * 9 * SEND_S)
    replies.wait(1, urgent=True)
    assert replies.queue.may_send
    replies.send()
    assert replies.queue.seconds_to_next() == pytest.approx(pause - SEND_S), "nor does it add to it"


def test_one_slow_send_delays_the_others_briefly(clock: Clock) -> None:
    replies = Replies(clock, share=0.1)
    replies.wait(1)
    replies.send(seconds=1.0)
    replies.wait(1)
    assert replies.queue.seconds_to_next() == pytest.approx(MAX_PAUSE_S)


def test_no_stream_waits_longer_than_it_may(clock: Clock) -> None:
    replies = Replies(clock, share=0.01)
    replies.wait(2 * MAX_BURST)
    came = clock.now
    assert replies.send_all() == MAX_BURST
    assert MAX_BURST * MAX_PAUSE_S > MAX_WAIT_S, "the pause alone is longer than that"
    clock.now += replies.queue.seconds_to_next()
    assert clock.now == pytest.approx(came + MAX_WAIT_S)
    assert replies.send_all() == MAX_BURST, "a burst, and not one by one"


def test_an_urgent_reply_does_not_shorten_a_pause(clock: Clock) -> None:
    replies = Replies(clock, share=0.1)
    replies.wait(MAX_BURST)
    assert replies.send_all() == MAX_BURST
    replies.wait(1, urgent=True)
    replies.send()  # no other reply waits: a burst of its own
    replies.wait(1)
    pause = MAX_BURST * 9 * SEND_S
    assert replies.queue.seconds_to_next() == pytest.approx(pause - SEND_S)
