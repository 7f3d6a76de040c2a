"""Admission and the queue: what is refused, with which words, and what is admitted."""

import sys
from typing import Any

import pytest
from jitney.errors import InternalError
from jitney.messages import Cancelled, Emitted, Failed, Finished, Submit
from jitney.sampling_params import SamplingParams

from tests.core.play import Play


def failure(play: Play, key: int) -> tuple[str, str]:
    end = play.ends[key]
    assert isinstance(end, Failed)
    return end.code, end.message


def test_a_request_that_never_fits_is_refused_with_the_numbers() -> None:
    play = Play(num_blocks=4, block_size=4)
    fits = play.submit([1] * 10, max_tokens=7)  # 16 slots: the 17th token is never computed
    beyond = play.submit([1] * 10, max_tokens=8)
    play.step()
    code, message = failure(play, beyond)
    assert code == "INVALID_ARGUMENT"
    for number in ("10 tokens", "8 output", "5 KV blocks", "has 4", "16 tokens"):
        assert number in message
    play.drain()
    assert isinstance(play.ends[fits], Finished)
    assert play.got(fits) == play.run_alone(fits)


def test_a_prompt_that_fills_the_context_is_refused() -> None:
    play = Play(max_model_len=8)
    key, longest = play.submit([1] * 8), play.submit([1] * 7, max_tokens=16)
    play.drain()
    assert failure(play, key)[0] == "INVALID_ARGUMENT"
    assert "8 tokens" in failure(play, key)[1]
    assert play.reasons[longest, 0] == "length"
    assert len(play.got(longest)[0]) == 1


def test_never_admits_only_what_fits_beside_all_reserved_blocks() -> None:
    play = Play(num_blocks=6, block_size=4, eviction="never")
    keys = [play.submit([key] * 4, max_tokens=9) for key in range(4)]  # 3 blocks each
    play.step()
    assert [row[0] for row in play.rows()] == keys[:2]
    play.drain()
    assert play.scheduler.live.preemptions == 0
    for key in keys:
        assert play.got(key) == play.run_alone(key)


def test_never_counts_all_sequences_of_a_request_and_shares_its_prompt() -> None:
    play = Play(num_blocks=5, block_size=4, eviction="never")
    fits = play.submit([1] * 9, n=3, max_tokens=4)  # 2 shared, 1 for each
    beyond = play.submit([1] * 9, n=4, max_tokens=4)
    one_token = play.submit([1] * 9, n=9, max_tokens=1)  # never forks
    play.drain()
    assert failure(play, beyond)[0] == "INVALID_ARGUMENT"
    assert "n = 4" in failure(play, beyond)[1]
    assert play.got(fits) == play.run_alone(fits)
    assert play.got(one_token) == play.run_alone(one_token)
    assert play.scheduler.live.reserved_blocks == 0


@pytest.mark.parametrize("overlap", [False, True])
def test_never_holds_the_source_of_a_copy_beside_the_reserved_blocks(overlap: bool) -> None:
    """The first sequence ends with the prompt, before its block is copied for the second; the
    third waits for a place among the running sequences."""
    options = {"num_blocks": 2, "block_size": 16, "max_num_seqs": 2, "eviction": "never"}
    asked = {"prompt": [1, 2, 3, 4, 5], "n": 3, "max_tokens": 2}
    unstopped = Play(**options)
    first, *others = (stream[0] for stream in unstopped.run_alone(unstopped.submit(**asked)))
    assert first not in others
    play = Play(overlap=overlap, **options)
    key = play.submit(**asked, stop_ids=frozenset([first]))
    play.drain()
    assert isinstance(play.ends[key], Finished)
    assert play.got(key) == play.run_alone(key)
    assert len(play.got(key)[0]) == 1


@pytest.mark.parametrize("options", [{}, {"prefix_caching": False}, {"eviction": "never"}])
def test_at_most_max_num_seqs_sequences_run_and_surplus_forks_wait(options: dict) -> None:
    play = Play(max_num_seqs=2, **options)
    keys = [play.submit([1, 2, 3, 4, 5, key], n=5, max_tokens=4) for key in range(3)]
    play.step()
    assert len(play.got(keys[0])[4]) == 1  # each has its first token with the prompt
    assert len(play.scheduler.live.running) == 2
    play.drain()
    assert max(len(batch.rows) for batch in play.batches) == 2
    assert play.order == keys
    for key in keys:
        assert play.got(key) == play.run_alone(key)
        end = play.ends[key]
        assert isinstance(end, Finished)
        assert end.timing.preemptions == 0  # a fork that waits for its place was never preempted
    assert play.scheduler.live.preemptions == 0


def test_a_prompt_counts_as_all_its_sequences() -> None:
    """So that few prompts of many forks are under way at once, and a step samples a bounded
    number of tokens."""
    play = Play(max_num_seqs=8, num_blocks=256)
    keys = [play.submit([key] * 9, n=5, max_tokens=6) for key in range(6)]
    play.step()
    assert [row[0] for row in play.rows()] == keys[:2]  # 5 of 8 places, then 3 of the other 5
    assert len(play.scheduler.live.running) == 8
    assert play.scheduler.live.admission.num_waiting == 2 + 4
    assert play.scheduler.stats().waiting == 4, "requests, and none of which a sequence runs"
    later = play.submit([9], max_tokens=1, priority=-1)
    play.drain()
    assert max(len(row.sample) for batch in play.batches for row in batch.rows) == 5
    assert max(sum(len(row.sample) for row in batch.rows) for batch in play.batches) < 8 + 5
    for key in (*keys, later):
        assert play.got(key) == play.run_alone(key)


def test_never_finds_places_and_blocks_for_all_that_can_run_at_once() -> None:
    options = {"block_size": 4, "eviction": "never", "max_num_seqs": 4}
    play = Play(num_blocks=64, **options)
    keys = [play.submit([key] * 9, n=3, max_tokens=4) for key in range(2)]
    play.step()
    assert [row[0] for row in play.rows()] == keys[:1]
    play.drain()
    for key in keys:
        assert play.got(key) == play.run_alone(key)
    # Four of the five at once: each 3 blocks, none of them shared for certain.
    for num_blocks in (11, 12):
        play = Play(num_blocks=num_blocks, prefix_caching=False, **options)
        key = play.submit([1] * 9, n=5, max_tokens=4)
        play.drain()
        assert isinstance(play.ends[key], Finished if num_blocks == 12 else Failed)


def test_forks_that_wait_reserve_nothing_when_nothing_of_their_request_runs() -> None:
    """Else a more urgent request, for which too little is left, and the forks behind it would
    wait for each other."""
    play = Play(num_blocks=4, block_size=4, eviction="never", max_num_seqs=1)
    key = play.submit([1] * 9, n=2, max_tokens=6)
    play.step()
    urgent = play.submit([2] * 9, max_tokens=6, priority=-1)
    play.drain()
    for each in (key, urgent):
        assert play.got(each) == play.run_alone(each)


def test_preempt_asks_for_the_prompt_and_the_watermark_only() -> None:
    play = Play(num_blocks=10, block_size=4, watermark=0.2)
    keys = [play.submit([key] * 16, max_tokens=9) for key in range(2)]
    play.step()
    assert [row[0] for row in play.rows()] == keys  # 8 of 10 blocks, 2 spare
    play = Play(num_blocks=10, block_size=4, watermark=0.3)
    keys = [play.submit([key] * 16, max_tokens=9) for key in range(2)]
    play.step()
    assert [row[0] for row in play.rows()] == keys[:1]
    play.drain()


def test_the_queue_limit_names_length_and_limit() -> None:
    play = Play(max_num_seqs=2, max_queued=3)
    keys = [play.submit([1, 2], max_tokens=4) for _ in range(7)]
    play.step()
    for key in keys[5:]:  # two are admitted, three wait
        code, message = failure(play, key)
        assert code == "UNAVAILABLE"
        assert "3 requests wait" in message
        assert "at most 3" in message
    play.drain()
    assert all(isinstance(play.ends[key], Finished) for key in keys[:5])


def test_lower_priority_numbers_go_first_and_equals_by_arrival() -> None:
    play = Play(max_num_seqs=1)
    late = play.submit([1], max_tokens=2, priority=1)
    play.now = 0.5
    first, second = (play.submit([1], max_tokens=2) for _ in range(2))
    play.drain()
    assert play.order == [first, second, late]


def test_waiting_makes_up_for_priority() -> None:
    """One level is worth ``aging_s`` seconds, so a stream of urgent requests ends in time."""
    play = Play(max_num_seqs=1, aging_s=2.0)
    patient = play.submit([1], max_tokens=1, priority=3)
    urgent = 0
    while patient not in play.ends:
        play.submit([1], max_tokens=1)
        play.now += 0.5
        play.step()
        urgent += 1
        assert urgent < 100
    assert urgent in (13, 14)  # 6 s of waiting, half a second each


def test_a_large_request_is_not_passed_over() -> None:
    play = Play(num_blocks=4, block_size=4, watermark=0.0)
    running = play.submit([1] * 8, max_tokens=4)
    play.step()
    large = play.submit([2] * 12, max_tokens=2)
    small = play.submit([3], max_tokens=2)
    play.drain()
    assert play.order == [running, large, small]


def test_a_deadline_in_the_queue_says_so() -> None:
    play = Play(max_num_seqs=1)
    running = play.submit([1, 2], max_tokens=20)
    queued = play.submit([1, 2], deadline=1.5)
    play.step(3)
    play.now = 1.5
    play.step()
    code, message = failure(play, queued)
    assert code == "DEADLINE_EXCEEDED"
    assert "1.500 s" in message
    assert "in the queue" in message
    play.drain()
    assert isinstance(play.ends[running], Finished)


def test_a_deadline_of_a_running_request_ends_it_with_what_it_has() -> None:
    play = Play()
    key = play.submit([1, 2], n=2, max_tokens=20, logprobs=0, deadline=1.0)
    play.step(4)
    play.now = 1.0
    report = play.step()
    assert report is not None
    ends = report.events[:2]
    assert [(end.index, end.ids, end.finish_reason) for end in ends] == [
        (0, [], "deadline"),
        (1, [], "deadline"),
    ]
    assert ends[0].logprobs == []
    assert ends[0].cumulative_logprob < 0
    assert isinstance(play.ends[key], Finished)
    assert [len(stream) for stream in play.got(key)] == [4, 4]
    assert play.scheduler.kv.num_used == 0


def held(play: Play, key: int, **options: Any) -> Submit:
    params = SamplingParams(seed=key, max_tokens=2)
    return Submit(key=key, prompt=[1, 2], params=params, arrival=play.now, **options)


def test_a_held_request_counts_as_queued_until_it_ends() -> None:
    play = Play(max_num_seqs=1, max_queued=2)
    scheduler = play.scheduler
    assert [scheduler.hold(held(play, key)) for key in range(3)] == [[], [], []]
    assert scheduler.stats().queued == 3
    assert not scheduler.has_work
    (full,) = scheduler.hold(held(play, 3))
    assert isinstance(full, Failed)
    assert full.code == "UNAVAILABLE"
    (refused,) = scheduler.submit(held(play, 4))
    assert isinstance(refused, Failed)
    assert scheduler.submit(held(play, 0)) == []
    assert scheduler.stats().queued == 3
    assert scheduler.cancel(1) == [Cancelled(1)]
    (failed,) = scheduler.fail(2, InternalError("no adapter"))
    assert isinstance(failed, Failed)
    assert scheduler.fail(2, InternalError("no adapter")) == []
    assert scheduler.stats().queued == 1


@pytest.mark.parametrize("tiers", [[], [{"name": "fast"}, {"name": "bulk", "max_queued": 1}]])
def test_the_queue_s_limit_knows_how_many_sequences_a_request_runs(tiers: list[dict]) -> None:
    play = Play(max_num_seqs=4, max_queued=1, tiers=tiers)
    runs, waits, refused = (play.submit([key], n=4, max_tokens=4) for key in range(3))
    play.step()
    assert failure(play, refused)[0] == "UNAVAILABLE"
    assert "1 requests wait, and at most 1 may" in failure(play, refused)[1]
    play.drain()
    for key in (runs, waits):
        assert play.got(key) == play.run_alone(key)


def test_a_held_request_is_refused_if_it_never_fits() -> None:
    play = Play(num_blocks=4, block_size=4)
    params = SamplingParams(seed=0, max_tokens=2)
    beyond = Submit(key=0, prompt=[1] * 17, params=params, arrival=0.0)
    (event,) = play.scheduler.hold(beyond)
    assert isinstance(event, Failed)
    assert event.code == "INVALID_ARGUMENT"


def test_a_held_request_ends_at_its_deadline() -> None:
    play = Play()
    scheduler = play.scheduler
    assert scheduler.next_deadline is None
    scheduler.hold(held(play, 0, deadline=2.0))
    scheduler.submit(held(play, 1, deadline=3.0))
    assert scheduler.next_deadline == 2.0
    assert scheduler.expire(1.9) == []
    (event,) = scheduler.expire(2.0)
    assert isinstance(event, Failed)
    assert event.code == "DEADLINE_EXCEEDED"
    assert "2.000 s after arrival" in event.message
    assert "in the queue" in event.message
    assert scheduler.next_deadline == 3.0


def test_a_resumed_request_is_not_asked_whether_the_queue_is_full() -> None:
    play = Play(max_num_seqs=1, max_queued=1)
    scheduler = play.scheduler
    for key in range(2):
        assert scheduler.submit(held(play, key)) == []
    emitted = {"emitted": [Emitted([1])], "first_token": 0.0}
    assert scheduler.hold(held(play, 2, **emitted)) == []
    assert scheduler.submit(held(play, 3, **emitted)) == []
    (refused,) = scheduler.submit(held(play, 4))
    assert isinstance(refused, Failed)


@pytest.mark.parametrize("shortage", ["rows", "blocks"])
def test_the_cost_of_a_step_does_not_depend_on_the_queue(shortage: str) -> None:
    """Counts lines of Python, not time."""

    def lines_of_a_step(waiting: int) -> int:
        options = {"max_num_seqs": 4} if shortage == "rows" else {"num_blocks": 24}
        play = Play(max_queued=10**6, watermark=0.0, **options)
        for _ in range(4 + waiting):
            play.submit([len(play.submits)] * 18, max_tokens=40, deadline=1e9)
        play.step(3)
        lines = 0

        def count(frame, event, arg):
            nonlocal lines
            lines += event == "line"
            return count

        def counted(call, *arguments):
            before = sys.gettrace()
            sys.settrace(count)
            try:
                return call(*arguments)
            finally:
                sys.settrace(before)

        batch = counted(play.scheduler.schedule, 0.0)
        counted(play.scheduler.update, batch, play.runner.execute(batch), 0.0)
        assert len(batch.rows) == 4
        return lines

    assert lines_of_a_step(10) == lines_of_a_step(3000)
