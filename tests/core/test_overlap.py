"""The overlapped step: planned and launched while the one before it is still in flight."""

import random

import pytest
from jitney.engine.engine import Engine
from jitney.messages import Cancel, Cancelled, Failed, Finish, Finished, StepReport, Tokens
from jitney.read_config import make_config

from tests.core.play import Play, carried, check_streams, overlapped

pytestmark = pytest.mark.usefixtures("quiet")


# ---------------------------------------------------------------------- the plan ahead


def test_a_step_is_launched_before_the_one_before_it_is_complete() -> None:
    play = overlapped()
    key = play.submit([1, 2, 3], max_tokens=4)
    first = play.step()
    assert first is not None
    assert first.events == []
    assert len(play.runner.in_flight) == 1
    second = play.step()
    assert len(play.batches) == 2
    assert second is not None
    assert [event.ids for event in second.events] == [play.run_alone(key)[0][:1]]
    assert len(play.runner.in_flight) == 1
    play.drain()
    check_streams(play, key)
    assert play.step() is None


def test_a_pending_token_is_carried_by_its_index_among_all_samples() -> None:
    play = overlapped()
    three = play.submit([9, 9], n=3, max_tokens=1)  # ends with this step: nobody waits for it
    keys = [play.submit([key, 2, 3], max_tokens=5) for key in range(2)]
    play.step(2)
    assert play.rows() == [(key, 0, 3, 4) for key in keys]
    assert carried(play) == [3, 4]
    assert [row.token_ids for row in play.batches[-1].rows] == [[0], [0]]
    play.step()
    assert carried(play) == [0, 1]
    play.drain()
    check_streams(play, three, *keys)


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 99])
def test_what_ends_by_length_has_no_surplus(max_tokens: int) -> None:
    play = overlapped(max_model_len=8)
    key = play.submit([1, 2, 3], max_tokens=max_tokens)
    reports = []
    while play.engine.has_work:
        reports.append(play.step())
    made = min(max_tokens, 5)
    assert sum(batch.num_tokens for batch in play.batches) == 3 + made - 1
    assert len(play.got(key)[0]) == made
    assert play.reasons[key, 0] == "length"


def test_a_block_is_found_only_after_the_step_that_filled_it_is_complete() -> None:
    play = overlapped(block_size=4)
    first = play.submit([1] * 9, max_tokens=3)
    play.step()
    twin = play.submit([1] * 9, max_tokens=3)
    play.step()  # planned while the first step is in flight
    assert play.rows()[-1] == (twin, 0, 0, 9)
    third = play.submit([1] * 9, max_tokens=3)
    play.step()
    assert play.rows()[-1] == (third, 0, 8, 9)
    play.drain()
    check_streams(play, first, twin, third)


@pytest.mark.parametrize(("can", "may"), [(True, False), (False, True)])
def test_without_the_runner_or_the_option_no_step_overlaps_another(can: bool, may: bool) -> None:
    play = Play(overlap=can)
    config = make_config({"model": "fake", "block_size": 4, "overlap": may})
    play.engine = Engine(config, play.runner, clock=lambda: 0.0)
    play.scheduler = play.engine.scheduler
    key = play.submit([1, 2, 3], max_tokens=3)
    report = play.step()
    assert report is not None
    assert len(report.events) == 1, "of this step, not of the one before"
    while play.engine.has_work:
        play.step()
        assert play.runner.in_flight == []
    check_streams(play, key)


# ---------------------------------------------------------------------- completed first

NEEDS = [
    {"repetition_penalty": 1.2},
    {"frequency_penalty": 0.5},
    {"presence_penalty": 0.5},
    {"bad_words_ids": [[4, 5]]},
]


@pytest.mark.parametrize("needs", NEEDS, ids=lambda needs: next(iter(needs)))
def test_a_token_that_the_host_must_know_is_waited_for(needs: dict) -> None:
    play = overlapped()
    plain = play.submit([1, 2, 3], max_tokens=9)
    play.step(2)
    assert carried(play) == [0]
    key = play.submit([4, 5, 6], max_tokens=4, **needs)
    while key not in play.ends:
        play.step()
    rows = [row for batch in play.batches for row in batch.rows if row.key == key]
    assert len(rows) == 4
    assert all(row.carried is None for row in rows)
    play.step()
    assert carried(play) == [0]  # and then it is as before
    play.drain()
    check_streams(play, plain, key)


@pytest.mark.parametrize("needs", NEEDS, ids=lambda needs: next(iter(needs)))
def test_one_request_that_reads_its_output_has_a_row_in_every_second_step(needs: dict) -> None:
    """The others go on as if it were not there: no step is completed first."""
    play = overlapped(num_blocks=256)
    crowd = [play.submit([key, 2, 3], max_tokens=30) for key in range(4)]
    key = play.submit([4, 5, 6], max_tokens=9, **needs)
    play.step()
    numbers = []
    while key not in play.ends:
        before = len(play.batches)
        play.step()
        assert len(play.batches) == before + 1
        assert len(play.runner.in_flight) == 1
        rows = play.batches[-1].rows
        assert [row.carried is not None for row in rows if row.key != key] == [True] * 4
        numbers.append(sum(row.key == key for row in rows))
    assert numbers[:16] == [0, 1] * 8
    play.drain()
    check_streams(play, *crowd, key)


def test_where_many_read_their_output_each_step_is_completed_first() -> None:
    play = overlapped(num_blocks=256)
    crowd = [play.submit([key, 2, 3], max_tokens=9) for key in range(5)]
    readers = [play.submit([key, 5], max_tokens=9, presence_penalty=1.0) for key in range(2)]
    while play.engine.has_work:
        play.step()
    assert all(len(batch.rows) == 7 for batch in play.batches)
    assert len(play.batches) == 9
    check_streams(play, *crowd, *readers)


def test_prompt_logprobs_hold_nobody_up() -> None:
    play = overlapped()
    key = play.submit([1, 2, 3, 4], max_tokens=4, prompt_logprobs=1)
    play.step(2)
    assert carried(play) == [0]
    play.drain()
    assert len(play.prompt_logprobs[key].logprobs) == 4
    check_streams(play, key)


def test_a_fork_is_waited_for_and_its_copies_are_made_once() -> None:
    play = overlapped(block_size=4)
    key = play.submit([1] * 6, n=3, max_tokens=5)
    play.step()
    assert len(play.batches) == 1
    play.step()  # completes the fork, then goes on with three sequences
    assert carried(play) == [None] * 3
    copies = play.batches[1].copies
    assert len(copies) == 2
    assert play.scheduler.kv.pending_copies() == copies
    play.step()
    assert carried(play) == [0, 1, 2]
    assert play.batches[2].copies == []
    assert play.scheduler.kv.pending_copies() == []
    play.drain()
    check_streams(play, key)


def test_blocks_are_taken_from_others_only_with_nothing_in_flight(monkeypatch) -> None:
    play = overlapped(num_blocks=9, block_size=2, max_num_batched_tokens=7)
    preempt = play.scheduler.live.preempt

    def checked(sequence, now):
        # A new fork that finds no block is a victim, too; it was never in flight.
        assert not play.runner.in_flight
        assert not play.scheduler.live.in_flight
        preempt(sequence, now)

    monkeypatch.setattr(play.scheduler.live, "preempt", checked)
    keys = [play.submit([key, 5, 6], n=1 + key % 2, max_tokens=12) for key in range(8)]
    play.drain()
    assert play.scheduler.live.preemptions > 5
    check_streams(play, *keys)


# ---------------------------------------------------------------------- ends found late


def totals(reports: list[StepReport]) -> tuple[int, int]:
    """Tokens emitted, and generated tokens counted."""
    emitted = sum(
        len(event.ids) for one in reports for event in one.events if isinstance(event, Tokens)
    )
    return emitted, sum(one.stats.generated_tokens for one in reports)


@pytest.mark.parametrize("how", ["stop id", "finish", "cancel", "deadline", "row"])
def test_the_surplus_of_an_ended_sequence_is_dropped_and_not_counted(how: str) -> None:
    play = overlapped(choose=lambda row, index: row.end)
    stop_ids = frozenset({6} if how == "stop id" else ())
    deadline = 5.0 if how == "deadline" else None
    key = play.submit([1, 2, 3], max_tokens=50, stop_ids=stop_ids, deadline=deadline)
    other = play.submit([1, 2], max_tokens=9)
    reports = [play.step() for _ in range(3)]
    assert play.got(key) == [[3, 4]]  # and the step that makes the third is in flight
    if how == "finish":
        play.engine.send(Finish(key, 0))
    elif how == "cancel":
        play.engine.send(Cancel(key))
    elif how == "deadline":
        play.now = 6.0
    elif how == "row":
        play.runner.bad_keys.add(key)
    while play.engine.has_work:
        reports.append(play.step())
    got = {"stop id": [3, 4, 5, 6]}.get(how, [3, 4])
    assert play.got(key) == [got]
    assert play.got(other) == [list(range(2, 11))]
    emitted, counted = totals([one for one in reports if one is not None])
    assert emitted == counted == len(got) + 9
    surplus = [row for batch in play.batches for row in batch.rows if row.key == key]
    assert len(surplus) == len(got) + 1 + (how == "row")
    assert play.scheduler.kv.num_used == 0
    end = play.ends[key]
    kinds = {"cancel": Cancelled, "row": Failed}
    assert isinstance(end, kinds.get(how, Finished))
    assert play.reasons.get((key, 0)) == {
        "stop id": "stop",
        "finish": "stop",
        "deadline": "deadline",
    }.get(how)


def test_blocks_of_an_ended_sequence_are_freed_when_its_step_is_complete() -> None:
    play = overlapped(num_blocks=3, block_size=4, watermark=0.0, prefix_caching=False)
    first = play.submit([1] * 9, max_tokens=3)
    play.step()
    play.engine.send(Cancel(first))
    second = play.submit([2] * 9, max_tokens=3)
    play.step()  # the first one's blocks are still being written
    assert play.ends[first] == Cancelled(first)
    assert len(play.batches) == 1
    assert not play.runner.in_flight
    play.step()
    assert play.rows() == [(second, 0, 0, 9)]
    play.drain()
    check_streams(play, second)


def test_blocks_of_a_surplus_row_are_freed_when_that_row_is_over() -> None:
    play = overlapped(
        num_blocks=4, block_size=4, watermark=0.0, choose=lambda row, index: row.end % 50
    )
    first = play.submit([1] * 6, max_tokens=10, stop_ids=frozenset({7}))
    play.step(3)  # its end by the token 7 is applied, its surplus row is in flight
    assert isinstance(play.ends[first], Finished)
    assert play.scheduler.kv.num_used == 2
    second = play.submit([2] * 13, max_tokens=2)  # wants all four
    play.step()
    assert play.rows()[0][0] == first
    assert play.scheduler.kv.num_used == 0
    play.step()
    assert play.rows() == [(second, 0, 0, 13)]
    play.drain()


def test_the_block_of_a_copy_in_flight_is_freed_later_though_its_sequence_has_no_row() -> None:
    play = overlapped(block_size=4, max_num_seqs=16, max_num_batched_tokens=16)
    key = play.submit([1] * 6, n=15, max_tokens=3)
    long = play.submit([2] * 40, max_tokens=1)
    play.step(2)  # two tokens are kept for the long prompt: the last fork has to wait for its row
    assert [row.index for row in play.batches[-1].rows if row.key == key] == list(range(14))
    assert len(play.batches[-1].copies) == 14
    play.engine.send(Finish(key, 14))
    play.step()
    assert play.reasons == {(key, 14): "stop"}
    play.drain()
    assert play.got(key)[:14] == play.run_alone(key)[:14]
    check_streams(play, long)


# ---------------------------------------------------------------------- both modes


class Script:
    """Traffic drawn once: what happens before which step."""

    def __init__(self, seed: int) -> None:
        chance = random.Random(seed)
        self.submits: list[tuple[int, list[int], dict]] = []
        self.cuts: dict[int, tuple[str, int, int]] = {}
        for at in range(0, 120, 2):
            params: dict = {"n": chance.choice([1, 1, 1, 2]), "max_tokens": chance.randrange(1, 14)}
            params["repetition_penalty"] = chance.choice([1.0] * 9 + [1.2])
            params["stop_ids"] = frozenset(chance.sample(range(50), chance.choice([0, 4])))
            prompt = [chance.randrange(3) for _ in range(chance.randrange(1, 12))]
            self.submits.append((at, prompt, params))
        for at in range(5, 120, 9):
            self.cuts[at] = chance.choice(["cancel", "finish"]), chance.randrange(at // 2), 0

    def play(self, **options) -> Play:
        play = Play(num_blocks=10, max_num_batched_tokens=9, max_num_seqs=8, **options)
        for step in range(120):
            for at, prompt, params in self.submits:
                if at == step:
                    play.submit(prompt, **params)
            if step in self.cuts:
                how, key, index = self.cuts[step]
                play.engine.send(Cancel(key) if how == "cancel" else Finish(key, index))
            play.step()
        play.drain()
        return play


@pytest.mark.parametrize("seed", range(6))
def test_both_modes_give_the_same_tokens(seed: int) -> None:
    """Under cancels, stops and preemptions. Who is cut off may have got a token more or less."""
    script = Script(seed)
    chance = random.Random(seed)
    one, other = script.play(), script.play(overlap=True, device=lambda: chance.random() < 0.4)
    assert one.scheduler.live.preemptions > 0 < other.scheduler.live.preemptions
    assert any(row.carried is not None for batch in other.batches for row in batch.rows)
    cut = {key for _, key, _ in script.cuts.values()}
    assert one.ends.keys() == other.ends.keys() == one.submits.keys()
    for key in one.submits:
        for mine, theirs in zip(one.got(key), other.got(key), strict=True):
            shorter = min(len(mine), len(theirs))
            assert mine[:shorter] == theirs[:shorter]
            assert key in cut or len(mine) == len(theirs)
