"""Tokens that a grammar forces: appended unsampled, computed in one step, reported at once."""

import pytest
from jitney.messages import Finish, Tokens

from tests.core.play import Play, check_streams, drafting, overlapped
from tests.solo_stream import solo_stream

FORCING = "2,3:40:7"


def runs(play: Play) -> list[int]:
    """Tokens of each row after the prompts."""
    rows = [row for batch in play.batches for row in batch.rows]
    return [len(row.token_ids) for row in rows if row.start >= len(row.prompt)]


@pytest.mark.parametrize("overlap", [False, True])
def test_a_run_is_one_row_and_one_event(overlap: bool) -> None:
    play = Play(overlap=overlap, block_size=16)
    key = play.submit([1, 2, 3], max_tokens=40, grammar=FORCING)
    events, forced = [], 0
    while play.engine.has_work:
        report = play.step()
        events += [event.ids for event in report.events if isinstance(event, Tokens)]
        forced += report.stats.forced_tokens
    check_streams(play, key)
    assert len(events) == len(play.batches) < 20
    assert runs(play) == [len(ids) for ids in events[:-1]], "the last ones are never computed"
    assert forced == 40 - len(events)
    assert play.reasons[key, 0] == "stop"


def forced_tokens(play: Play) -> int:
    """How many are reported while some requests are served, whose grammar forces one at times."""
    keys = [play.submit([1, 2, 3, key], max_tokens=30, grammar="2,3:30:1") for key in range(4)]
    forced = 0
    while play.engine.has_work:
        forced += play.step().stats.forced_tokens
    check_streams(play, *keys)
    return forced


@pytest.mark.parametrize("chance", [0.7, 1.0])
def test_a_forced_token_counts_as_forced_though_a_draft_had_it(chance: float) -> None:
    """The streams are the same, and so is what their grammar forces."""
    with_drafts = drafting(Play, chance, num_blocks=256)
    assert forced_tokens(with_drafts) == forced_tokens(Play(num_blocks=256)) > 0
    assert any(row.drafts for batch in with_drafts.batches for row in batch.rows)


@pytest.mark.parametrize(
    "parameters",
    [
        {"logprobs": 0},
        {"bad_words_ids": [[49, 49]]},
        {"logit_bias": {1: 1.0}},
        {"allowed_token_ids": [*range(50)]},
    ],
)
def test_nothing_is_taken_where_values_or_spellings_matter(parameters: dict) -> None:
    play = Play()
    key = play.submit([1, 2, 3], max_tokens=20, grammar=FORCING, **parameters)
    play.drain()
    assert runs(play) == [1] * 19
    assert len(play.got(key)[0]) == 20


@pytest.mark.parametrize("max_tokens", range(1, 12))
def test_a_run_ends_with_the_sequence(max_tokens: int) -> None:
    play = Play(max_model_len=12)
    key = play.submit([1, 2, 3], max_tokens=max_tokens, grammar=FORCING)
    play.drain()
    assert play.got(key) == [solo_stream(play.submits[key], max_model_len=12)]
    assert len(play.got(key)[0]) == min(max_tokens, 9)
    assert play.reasons[key, 0] == "length"


@pytest.mark.parametrize("min_tokens", [0, 20])
def test_a_stop_id_is_never_forced(min_tokens: int) -> None:
    """The sampler may make another token of it while the output may not end."""
    play = Play()
    sampled: list[int] = []
    noted = play.runner._serve
    play.runner._serve = lambda row: sampled.extend((made := noted(row)).token_ids) or made
    options = {"max_tokens": 40, "min_tokens": min_tokens, "stop_ids": frozenset(range(0, 50, 3))}
    key = play.submit([1, 2, 3], grammar=FORCING, **options)
    play.drain()
    check_streams(play, key)
    made = play.got(key)[0]
    assert len(sampled) < len(made) or not min_tokens
    assert {token for token in made if token % 3 == 0} <= set(sampled)


def test_a_run_keeps_to_the_budget_of_a_step() -> None:
    play = Play(max_num_batched_tokens=4, max_num_seqs=2)
    keys = [play.submit([1, 2, key], max_tokens=40, grammar=FORCING) for key in range(2)]
    play.drain()
    check_streams(play, *keys)
    assert max(batch.num_tokens for batch in play.batches) == 4
    assert max(runs(play)) > 2
    unsampled = [row for batch in play.batches for row in batch.rows if not row.sample]
    assert any(row.start >= len(row.prompt) for row in unsampled), "a run in two steps"


def test_a_run_leaves_every_other_sequence_its_token() -> None:
    play = Play(block_size=16, num_blocks=512, max_num_batched_tokens=16, max_model_len=3000)
    forcing = play.submit([1, 2, 3], max_tokens=400, grammar="2,3:400:300")
    plain = [play.submit([key, 2, 3], max_tokens=30) for key in range(4)]
    play.step(2)
    for count in range(2, 30):
        play.step()
        assert {len(play.got(key)[0]) for key in plain} == {count + 1}
    play.drain()
    check_streams(play, forcing, *plain)
    assert 12 in runs(play)


@pytest.mark.parametrize(("overlap", "longest"), [(False, 30), (True, 3)])
def test_a_long_run(overlap: bool, longest: int) -> None:
    """Planned ahead, it takes one new block in each step."""
    play = Play(overlap=overlap, block_size=2, num_blocks=256)
    plain = [play.submit([key, 2, 3], max_tokens=90) for key in range(3)]  # else no step is ahead
    key = play.submit([1, 2, 5], max_tokens=90, grammar="2,3:90:40")
    play.drain()
    check_streams(play, key, *plain)
    assert (max(runs(play)) >= longest) if not overlap else (max(runs(play)) == longest)


@pytest.mark.parametrize("play", [Play, overlapped])
def test_runs_where_blocks_are_short(play: type[Play]) -> None:
    """Some are preempted, forks too, and all that is forced is computed again with the rest."""
    short = play(num_blocks=14, block_size=2, max_num_seqs=6, watermark=0.0)
    keys = [
        short.submit([1, 2, key], n=1 + key % 3, max_tokens=18, grammar=FORCING) for key in range(5)
    ]
    short.drain()
    check_streams(short, *keys)
    assert short.scheduler.live.preemptions > 3
    assert max(runs(short)) > 3


@pytest.mark.parametrize("num_blocks", range(12, 36, 2))
def test_a_step_is_planned_ahead_only_with_a_block_for_each_run(num_blocks: int) -> None:
    play = overlapped(num_blocks=num_blocks, block_size=4, watermark=0.0)
    keys = [play.submit([1, 2, key], max_tokens=30) for key in range(6)]
    keys.insert(3, play.submit([4], max_tokens=30, grammar=FORCING))
    play.drain()
    check_streams(play, *keys)


def test_a_run_waits_for_no_prefill() -> None:
    """It is a decode: the chunks of a long prompt come after it."""
    play = Play(block_size=16, max_num_batched_tokens=16)
    first = play.submit([1, 2, 3], max_tokens=40, grammar=FORCING, priority=1)
    play.step(2)
    long = play.submit(list(range(40)) * 4, max_tokens=2)
    before = len(play.got(first)[0])
    play.step(8)
    assert len(play.got(first)[0]) > before + 8
    assert not play.got(long)[0]
    play.drain()
    check_streams(play, first, long)


def test_who_makes_way_for_itself_is_admitted_in_the_same_step() -> None:
    """A fork that runs alone needs one block more than there are while its copy is pending."""
    preempted = 0
    for tail in range(30):
        play = Play(num_blocks=3, block_size=4, watermark=0.0)
        play.submit([3, 1, 4, 1, 5, tail], n=2, max_tokens=4, grammar="2,3:9:2")
        while play.engine.has_work and not play.scheduler.kv.pending_copies():
            play.step()
        play.engine.send(Finish(0, 0))
        play.step()
        play.drain()
        assert play.got(0)[1] == play.run_alone(0)[1]
        preempted += play.scheduler.live.preemptions
    assert preempted > 0
