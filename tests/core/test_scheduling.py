"""What stands in a step: chunks beside decodes, forks, preemption and the prefix cache."""

import pytest
from jitney.messages import Cancel, Cancelled, Finish, Finished

from tests.core.play import Play
from tests.fake_tokens import VOCAB_SIZE, candidates


def test_chunks_and_decodes_share_the_budget() -> None:
    play = Play(max_num_batched_tokens=6)
    short = play.submit([1, 2], max_tokens=8)
    play.step()
    long = play.submit([3] * 12, max_tokens=3)
    play.step()
    assert play.rows() == [(short, 0, 2, 3), (long, 0, 0, 5)]
    assert play.batches[-1].rows[1].sample == ()
    play.step(2)
    assert play.rows() == [(short, 0, 4, 5), (long, 0, 10, 12)]
    assert play.batches[-1].rows[1].sample == (0,)
    play.step()
    assert play.rows() == [(short, 0, 5, 6), (long, 0, 12, 13)]
    play.drain()
    for key in (short, long):
        assert play.got(key) == play.run_alone(key)


def test_an_urgent_prompt_does_not_hold_up_decodes() -> None:
    play = Play(max_num_batched_tokens=4)
    decoding = play.submit([1, 2], max_tokens=8)
    play.step()
    play.submit([3] * 40, priority=-5, max_tokens=1)
    for _ in range(5):
        play.step()
        assert play.rows()[0][0] == decoding


def test_a_surplus_fork_computes_only_what_the_cache_lacks() -> None:
    play = Play(max_num_seqs=2, block_size=4)
    key = play.submit([1] * 10, n=3, max_tokens=3)
    play.drain()
    starts = [row.start for batch in play.batches for row in batch.rows if row.index == 2]
    assert starts == [8, 11]
    assert play.got(key) == play.run_alone(key)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_prompt_advances_beside_as_many_decodes_as_there_can_be(overlap: bool) -> None:
    play = Play(num_blocks=1024, max_num_seqs=64, max_num_batched_tokens=64, overlap=overlap)
    crowd = [play.submit([key], max_tokens=60) for key in range(63)]
    play.step(2)
    prompt = play.submit([7] * 160, max_tokens=2)
    steps = 0
    while prompt not in play.order:
        play.step()
        steps += 1
        assert steps < 100
    assert steps <= 1 + 160 // 8 + overlap  # an eighth of the budget for each chunk
    assert play.batches[-1].num_tokens <= 64
    play.drain()
    for key in (*crowd, prompt):
        assert play.got(key) == play.run_alone(key)


def test_a_budget_below_max_num_seqs_bounds_the_sequences_too() -> None:
    play = Play(num_blocks=256, max_num_seqs=64, max_num_batched_tokens=6)
    keys = [play.submit([key], max_tokens=9) for key in range(20)]
    while play.engine.has_work:
        play.step()
        assert len(play.scheduler.live.running) <= 6
    for key in keys:
        assert play.got(key) == play.run_alone(key)


def test_hundreds_of_requests_of_many_sequences_keep_steps_small() -> None:
    """By counts; the times are in benchmarks/scheduler.py."""
    play = Play(num_blocks=2048, max_num_seqs=64, max_num_batched_tokens=512)
    crowd = [play.submit([key, 1, 2], n=128, max_tokens=3) for key in range(256)]
    prompt = play.submit([7] * 600, priority=-1, max_tokens=1)
    reports = [play.step() for _ in range(12)]
    assert play.order[:2] == [prompt, crowd[0]]
    assert len(play.scheduler.live.running) <= 64
    for report, batch in zip(reports, play.batches, strict=True):
        assert report is not None
        assert len(batch.rows) <= 64
        assert len(report.events) < 64 + 128
    assert (
        sum(len(each.sequences) for each in play.scheduler.live.requests.values()) < 256 + 4 * 128
    )


def test_n_sequences_prefill_once_then_share_full_blocks_and_copy_the_partial_one() -> None:
    play = Play(block_size=4)
    key = play.submit([1] * 10, n=3, max_tokens=6)
    play.step()
    assert play.rows() == [(key, 0, 0, 10)]
    assert play.batches[-1].rows[0].sample == (0, 1, 2)
    assert play.batches[-1].copies == []
    play.step()
    rows, copies = play.batches[-1].rows, play.batches[-1].copies
    assert [(row.index, row.start, row.sample) for row in rows] == [
        (0, 10, (0,)),
        (1, 10, (1,)),
        (2, 10, (2,)),
    ]
    source = rows[0].block_table[2]
    assert copies == [(source, row.block_table[2]) for row in rows[1:]]
    assert rows[0].block_table[:2] == rows[1].block_table[:2] == rows[2].block_table[:2]
    play.step()
    assert play.batches[-1].copies == []
    play.drain()
    assert play.got(key) == play.run_alone(key)
    assert len(set(map(tuple, play.got(key)))) == 3


def test_the_last_arrived_of_the_lowest_priority_is_preempted_and_resumes_first() -> None:
    play = Play(num_blocks=6, block_size=4, watermark=0.0, prefix_caching=False)
    low = play.submit([1] * 7, max_tokens=6, priority=1)
    old = play.submit([2] * 7, max_tokens=6)
    young = play.submit([3] * 7, max_tokens=6)
    play.step(2)
    assert play.scheduler.live.preemptions == 0
    play.step()  # each wants a third block; `low` loses its own
    assert {row[0] for row in play.rows()} == {old, young}
    later = play.submit([4], max_tokens=2, priority=1)
    play.drain()
    assert play.order.index(later) == 3
    for key in (low, old, young, later):
        assert play.got(key) == play.run_alone(key)
        end = play.ends[key]
        assert isinstance(end, Finished)
        assert end.timing.preemptions == (1 if key == low else 0)
    resumed = [
        row for batch in play.batches[1:] for row in batch.rows if row.key == low and row.start == 0
    ]
    assert len(resumed) == 1
    assert resumed[0].sample == (0,)  # only the token after those already sent
    assert resumed[0].token_ids[:7] == [1] * 7
    assert len(resumed[0].token_ids) == 7 + 2


def test_preemption_of_many_gives_the_same_streams() -> None:
    play = Play(num_blocks=9, block_size=2, max_num_batched_tokens=7)
    keys = [play.submit([key, 5, 6], n=1 + key % 2, max_tokens=12) for key in range(8)]
    play.drain()
    assert play.scheduler.live.preemptions > 5
    for key in keys:
        assert play.got(key) == play.run_alone(key)


def test_a_cached_prefix_is_not_computed_again_but_one_token_always_is() -> None:
    play = Play(block_size=4)
    prompt = list(range(8))
    keys = []
    for _ in range(2):
        keys.append(play.submit(prompt, max_tokens=2))
        play.drain()
    assert play.rows(0) == [(keys[0], 0, 0, 8)]
    assert play.rows(2) == [(keys[1], 0, 4, 8)]  # both blocks are cached; 7 // 4 are used
    end = play.ends[keys[1]]
    assert isinstance(end, Finished)
    assert (end.timing.cached_prompt_tokens, end.timing.computed_prompt_tokens) == (4, 4)
    longer = play.submit([*prompt, 9], max_tokens=2)
    report = play.step()
    assert play.rows() == [(longer, 0, 8, 9)]
    assert report is not None
    assert (report.stats.prefix_hit_tokens, report.stats.prefix_query_tokens) == (8, 9)
    play.drain()
    for key in (*keys, longer):
        assert play.got(key) == play.run_alone(key)


@pytest.mark.parametrize(("salts", "start"), [(("a", "a"), 8), (("a", "b"), 0), ((None, "a"), 0)])
def test_salts_separate_tenants(salts: tuple[str | None, str | None], start: int) -> None:
    play = Play(block_size=4)
    for salt in salts:
        play.submit([1] * 9, max_tokens=1, cache_salt=salt)
        play.drain()
    assert play.rows()[0][2] == start


def test_prompt_logprobs_read_no_prefix_and_come_once_and_whole() -> None:
    play = Play(block_size=4, max_num_batched_tokens=3)
    prompt = [4, 3, 2, 1, 4, 3, 2, 1, 9]
    play.submit(prompt, max_tokens=1)
    play.drain()
    key = play.submit(prompt, max_tokens=2, prompt_logprobs=1)
    play.step()
    assert play.rows() == [(key, 0, 0, 3)]
    play.drain()
    expected = [candidates(token, at, VOCAB_SIZE) for at, token in enumerate(prompt)]
    assert play.prompt_logprobs[key].logprobs == [None, *expected[1:]]
    assert play.got(key) == play.run_alone(key)


def test_stop_ids_end_a_sequence_after_min_tokens() -> None:
    play = Play(choose=lambda row, index: 7)
    key = play.submit([1], max_tokens=9, min_tokens=2, stop_ids=frozenset({7}))
    report = play.step(3)
    assert report is not None
    assert report.events[0].stop_id == 7
    assert play.got(key) == [[7, 7, 7]]
    assert play.reasons[key, 0] == "stop"


def test_finish_ends_one_sequence_and_the_last_one_ends_the_request() -> None:
    play = Play()
    key = play.submit([1, 2, 3], n=2, max_tokens=50)
    play.step(3)
    play.engine.send(Finish(key, 1))
    play.engine.send(Finish(key, 1))
    play.engine.send(Finish(key, 9))
    play.engine.send(Finish(99, 0))
    play.step()
    assert play.reasons == {(key, 1): "stop"}
    assert play.rows() == [(key, 0, 5, 6)]
    play.engine.send(Finish(key, 0))
    report = play.step()
    assert isinstance(play.ends[key], Finished)
    assert report is not None
    assert report.stats.blocks_used == report.stats.running == 0


@pytest.mark.parametrize("steps", [0, 1, 3, 4])
def test_cancel_in_any_state(steps: int) -> None:
    """In the inbox, in a chunk, at the end of the prompt, while decoding."""
    play = Play(max_num_batched_tokens=3)
    key = play.submit([1] * 8, n=2, max_tokens=8)
    play.step(steps)
    for _ in range(2):
        play.engine.send(Cancel(key))
    play.step()
    assert play.ends == {key: Cancelled(key)}
    assert play.step() is None
    assert play.scheduler.kv.num_used == 0


def test_timing_and_stats() -> None:
    play = Play(max_num_seqs=1)
    play.submit([1] * 5, max_tokens=2)
    play.now = 1.0
    key = play.submit([2] * 5, max_tokens=3)
    report = play.step()
    assert report is not None
    stats = report.stats
    assert (stats.waiting, stats.running, stats.batch_sequences) == (1, 1, 1)
    assert (stats.prefill_tokens, stats.generated_tokens, stats.blocks_used) == (5, 1, 2)
    assert stats.blocks_total == 64
    play.step()
    play.now = 4.0
    play.step()
    play.now = 6.0
    play.step(2)
    end = play.ends[key]
    assert isinstance(end, Finished)
    timing = end.timing
    assert (timing.queue_s, timing.first_token_s, timing.total_s) == (3.0, 3.0, 5.0)
    assert (timing.cached_prompt_tokens, timing.computed_prompt_tokens) == (0, 5)


def test_output_that_is_computed_again_counts_as_no_prompt() -> None:
    play = Play(num_blocks=8, block_size=4, watermark=0.0)
    for key in range(3):
        play.submit([key] * 6, max_tokens=12)
    computed = 0
    looked_up = 0
    found = 0
    while play.engine.has_work:
        report = play.step()
        assert report is not None
        computed += report.stats.prefill_tokens
        looked_up += report.stats.prefix_query_tokens
        found += report.stats.prefix_hit_tokens
    admissions = 3 + play.scheduler.live.preemptions
    assert admissions > 3
    assert looked_up == 6 * admissions
    assert computed == looked_up - found
