"""The engine's step and loop: faults stay with who caused them, and the thread comes and goes."""

import queue
import threading
import time

import pytest
from jitney.batch import Batch, StepOutput
from jitney.engine.handle import LocalEngine
from jitney.errors import DeviceLostError, UnavailableError
from jitney.messages import Cancel, Cancelled, Failed, Finish, Finished, StepReport, Submit, Tokens
from jitney.sampling_params import SamplingParams

from tests.core.play import Play


def poison(*keys: int):
    def faults(batch: Batch, written: bool) -> None:
        if written and any(row.key in keys for row in batch.rows):
            raise RuntimeError("device-side secret at /home/x")

    return faults


def test_a_request_that_comes_while_a_step_begins_has_not_waited_less_than_nothing() -> None:
    play = Play()

    def clock() -> float:
        now, play.now = play.now, play.now + 1.0
        if not play.submits:
            play.submit([1, 2, 3], max_tokens=1)  # it arrives right after the clock was read
        return now

    play.engine._clock = clock
    play.step()
    play.drain()
    end = play.ends[0]
    assert isinstance(end, Finished)
    assert end.timing.queue_s is not None
    assert end.timing.queue_s >= 0


def test_a_flood_of_messages_keeps_no_step_from_being_made() -> None:
    play = Play()

    def clock() -> float:
        play.engine.send(Cancel(key=12345))  # another one comes whenever the inbox was read
        play.now += 1e-3
        return play.now

    play.submit([1, 2, 3], max_tokens=2)
    play.engine._clock = clock
    for _ in range(5):
        play.step()
    assert isinstance(play.ends[0], Finished)


@pytest.mark.parametrize("culprit", range(5))
def test_a_raising_request_fails_alone(culprit: int) -> None:
    play = Play(faults=poison(culprit))
    keys = [play.submit([key, 1, 2, 3, 4], n=1 + key % 2, max_tokens=6) for key in range(5)]
    play.drain()
    for key in keys:
        if key == culprit:
            end = play.ends[key]
            assert isinstance(end, Failed)
            assert end.code == "INTERNAL"
            assert "secret" not in end.message
        else:
            assert isinstance(play.ends[key], Finished)
            assert play.got(key) == play.run_alone(key)
    # 1 + 2 halves, and so on down to the culprit: a search, not a scan
    assert len(play.batches) <= 6 + 2 * 3


def test_a_request_that_begins_to_raise_in_mid_stream_keeps_its_tokens_until_then() -> None:
    play = Play(faults=lambda batch, written: poison(1)(batch, written and batch.rows[0].start > 5))
    keys = [play.submit([key, 1, 2], max_tokens=8) for key in range(3)]
    play.drain()
    assert isinstance(play.ends[1], Failed)
    assert play.got(1)[0] == play.run_alone(1)[0][: len(play.got(1)[0])] != []
    for key in (keys[0], keys[2]):
        assert play.got(key) == play.run_alone(key)


def test_a_passing_fault_of_a_step_of_many_fails_nobody() -> None:
    raised = []

    def faults(batch: Batch, written: bool) -> None:
        if len(raised) < 2 and batch.copies and len(batch.rows) > 1 and not written:
            raised.append(batch)
            raise RuntimeError("passing")

    play = Play(faults=faults)
    keys = [play.submit([key, 1, 2], n=2, max_tokens=8) for key in range(3)]
    play.drain()
    assert len(raised) == 2
    for key in keys:
        assert play.got(key) == play.run_alone(key)


@pytest.mark.parametrize("at", range(1, 6))
@pytest.mark.parametrize("written", [False, True])
def test_a_passing_fault_of_a_lone_request_does_not_fail_it(at: int, written: bool) -> None:
    calls = []

    def faults(batch: Batch, when: bool) -> None:
        if when == written:
            calls.append(batch)
            if len(calls) == at:
                raise RuntimeError("passing")

    play = Play(faults=faults)
    key = play.submit([1, 2, 3], max_tokens=5)
    play.drain()
    assert len(calls) == 6
    assert isinstance(play.ends[key], Finished)
    assert play.got(key) == play.run_alone(key)


def test_a_lone_request_that_raises_twice_fails() -> None:
    play = Play(faults=poison(0))
    key = play.submit([1, 2, 3], max_tokens=5)
    play.drain()
    assert isinstance(play.ends[key], Failed)
    assert len(play.batches) == 2


def test_an_error_of_a_row_fails_its_request() -> None:
    play = Play()
    keys = [play.submit([key, 1, 2], n=2, max_tokens=8) for key in range(3)]
    play.step(2)
    play.runner.bad_keys.add(1)
    play.drain()
    assert play.ends[1] == Failed(1, "INTERNAL", "the logits are not finite")
    for key in (keys[0], keys[2]):
        assert play.got(key) == play.run_alone(key)


@pytest.mark.parametrize("overlap", [False, True])
def test_steps_that_the_memory_does_not_suffice_for_are_counted_and_halved(overlap: bool) -> None:
    """Nobody fails: halves of the batch fit."""
    raised = []

    def faults(batch: Batch, written: bool) -> None:
        if not written and len(batch.rows) > 2:
            raised.append(batch)
            raise MemoryError("the device's")

    play = Play(overlap=overlap, faults=faults)
    keys = [play.submit([1, 2, key], max_tokens=4) for key in range(4)]
    counted = 0
    while play.engine.has_work:
        report = play.step()
        counted += report.stats.out_of_memory if report is not None else 0
    assert 3 <= counted <= len(raised)  # what follows a failed step is dropped
    for key in keys:
        assert isinstance(play.ends[key], Finished)
        assert play.got(key) == play.run_alone(key)


class Loop:
    """An engine in a thread of its own."""

    def __init__(self, play: Play) -> None:
        self.engine = play.engine
        self.reports: queue.SimpleQueue[StepReport] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self.engine.run, args=(self.reports,), daemon=True)
        self.thread.start()

    def submit(self, key: int, **params) -> None:
        made = SamplingParams(seed=key, **params)
        self.engine.send(Submit(key=key, prompt=[1, 2, 3], params=made, arrival=0.0))

    def end_of(self, key: int):
        """Wait for the terminal event of one request."""
        while True:
            for event in self.reports.get(timeout=60).events:
                if event.key == key and not isinstance(event, Tokens):
                    return event

    def stop(self) -> None:
        self.engine.stop()
        self.thread.join(60)
        assert not self.thread.is_alive()


@pytest.mark.parametrize("overlap", [False, True])
def test_the_loop_serves_sleeps_and_stops(overlap: bool) -> None:
    play = Play(overlap=overlap)
    loop = Loop(play)
    for key in range(3):
        loop.submit(key, max_tokens=5)
        assert isinstance(loop.end_of(key), Finished)
    time.sleep(0.4)  # past the check of the integrity
    assert loop.reports.empty()
    batches = play.runner.batches
    loop.submit(3, max_tokens=5)
    assert isinstance(loop.end_of(3), Finished)
    assert play.runner.batches == batches + 5
    loop.stop()
    with pytest.raises(UnavailableError):
        loop.submit(4)
    loop.engine.send(Cancel(4))


@pytest.mark.parametrize("overlap", [False, True])
def test_stopping_ends_what_is_open(overlap: bool) -> None:
    play = Play(num_blocks=4096, overlap=overlap)
    loop = Loop(play)
    loop.submit(0, max_tokens=10_000)
    loop.submit(1, max_tokens=10_000)
    loop.reports.get(timeout=60)
    loop.stop()
    assert play.runner.in_flight == []
    assert play.runner.violations == []
    ends = []
    while not loop.reports.empty():
        ends += [one for one in loop.reports.get().events if isinstance(one, Failed)]
    assert [(end.key, end.code) for end in ends] == [(0, "UNAVAILABLE"), (1, "UNAVAILABLE")]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("fault_at", [1, 4])
def test_a_lost_device_ends_the_loop_and_no_request(overlap: bool, fault_at: int) -> None:
    """No request is tried again, for none would live, and none ends: another engine resumes it."""
    batches = []

    def faults(batch: Batch, written: bool) -> None:
        if not written:
            batches.append(batch)
            if len(batches) >= fault_at:
                raise DeviceLostError("the device has failed for good")

    play = Play(overlap=overlap, faults=faults)
    for _ in range(3):
        play.submit([1, 2, 3], max_tokens=50)
    reports: queue.SimpleQueue[StepReport] = queue.SimpleQueue()
    with pytest.raises(DeviceLostError):
        play.engine.run(reports)
    assert fault_at <= len(batches) <= fault_at + overlap
    while not reports.empty():
        assert all(isinstance(one, Tokens) for one in reports.get().events)
    with pytest.raises(UnavailableError):
        play.engine.send(play.submits[0])


def test_a_bug_in_the_loop_ends_every_request_and_the_engine_goes_on(monkeypatch) -> None:
    play = Play(num_blocks=4096)

    def broken(*args):
        raise KeyError("our bug")

    monkeypatch.setattr(play.scheduler, "update", broken)
    loop = Loop(play)
    loop.submit(0, max_tokens=5)
    end = loop.end_of(0)
    assert isinstance(end, Failed)
    assert (end.code, end.message) == ("INTERNAL", "the engine failed")
    loop.submit(1, max_tokens=5)
    assert isinstance(loop.end_of(1), Finished)
    loop.stop()


def test_a_message_ends_the_check_when_idle(monkeypatch) -> None:
    play = Play()
    slices = []

    def checks():
        for number in range(100):
            slices.append(number)
            if number == 3:
                play.engine.send(Cancel(0))
            yield

    monkeypatch.setattr(play.scheduler, "integrity_checks", checks)
    play.engine._sleep_while_idle()
    assert slices == [0, 1, 2, 3]


def test_broken_integrity_while_idle_is_repaired() -> None:
    play = Play()
    broken = play.scheduler
    broken.kv._free.pop()
    loop = Loop(play)
    deadline = time.monotonic() + 60
    while loop.engine.scheduler is broken and time.monotonic() < deadline:
        time.sleep(0.02)
    assert loop.engine.scheduler is not broken
    loop.submit(0, max_tokens=3)
    assert isinstance(loop.end_of(0), Finished)
    loop.stop()


def raise_error(*of: object) -> None:
    raise RuntimeError("our bug")


def ends_of(report: StepReport | None) -> dict[int, type]:
    assert report is not None
    ends = [event for event in report.events if not isinstance(event, Tokens)]
    assert len({event.key for event in ends}) == len(ends), "a second end"
    return {event.key: type(event) for event in ends}


def test_a_message_that_raises_takes_no_event_of_those_before_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    play = Play()
    play.submit([1, 2, 3], max_tokens=8)
    play.submit([1, 2, 4], max_tokens=8)
    play.step()
    play.engine.send(Cancel(0))
    play.engine.send(Finish(1, 0))
    monkeypatch.setattr(play.scheduler, "stop_sequence", raise_error)
    assert ends_of(play.engine._step_or_recover()) == {0: Cancelled, 1: Failed}
    assert not play.engine.has_work


def test_figures_that_raise_take_no_event_of_their_step(monkeypatch: pytest.MonkeyPatch) -> None:
    play = Play()
    play.submit([1, 2, 3], max_tokens=1)
    play.submit([1, 2, 4], max_tokens=8)
    monkeypatch.setattr(play.engine.pending, "report", raise_error)
    assert ends_of(play.engine._step_or_recover()) == {0: Finished, 1: Failed}


def test_a_step_that_raises_leaves_its_events_to_the_next_one() -> None:
    play = Play()
    play.submit([1, 2, 3], max_tokens=8)
    play.step()
    local = LocalEngine(play.engine)
    local.send(Cancel(0))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(play.scheduler, "stats", raise_error)
        with pytest.raises(RuntimeError):
            local.step()
    assert local.has_work
    assert ends_of(local.step()) == {0: Cancelled}


def test_a_step_whose_device_is_lost_is_waited_for_once() -> None:
    class Lost:
        waits = 0

        def wait(self) -> StepOutput:
            self.waits += 1
            raise DeviceLostError("gone")

    lost = Lost()
    play = Play()
    play.runner.launch = lambda batch: lost
    play.submit([1, 2, 3])
    with pytest.raises(DeviceLostError):
        play.engine.step()
    play.engine.abandon()
    assert lost.waits == 1


def test_a_report_says_whether_a_step_is_in_flight() -> None:
    play = Play(overlap=True)
    play.submit([1, 2, 3], max_tokens=3)
    in_flight = []
    while play.engine.has_work:
        report = play.step()
        assert report is not None
        in_flight.append(report.stats.steps_in_flight)
    assert in_flight == [1, 1, 1, 0]
