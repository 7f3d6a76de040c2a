"""Drafts: the same tokens in fewer steps, nothing that is not accepted, nobody's blocks."""

import pytest
from jitney.core.policy.plain import NoLimits
from jitney.core.policy.prices import NO_DRAFTS, Prices
from jitney.core.policy.seam import DraftChoice
from jitney.messages import Tokens

from tests.core.play import MODEL, Play, check_streams, drafting, overlapped

PLAYS = pytest.mark.parametrize("play", [Play, overlapped])


@PLAYS
def test_right_drafts_make_several_tokens_a_step(play: type[Play]) -> None:
    one = drafting(play)
    key = one.submit([1, 2, 3], max_tokens=21, logprobs=0)
    rows = drafts = accepted = tokens = 0
    while one.engine.has_work:
        report = one.step()
        rows += report.stats.draft_rows
        drafts += report.stats.draft_tokens
        accepted += report.stats.accepted_tokens
        tokens += report.stats.generated_tokens
        for event in report.events:
            if isinstance(event, Tokens):
                assert len(event.logprobs) == len(event.ids)
    check_streams(one, key)
    # With overlap the second token's step is planned before there is anything to draft behind.
    ahead = int(play is overlapped)
    assert (rows, drafts, accepted, tokens) == (4, 16 - ahead, 16 - ahead, 21)
    assert len(one.batches) == 5 + ahead, "the prompt, and four times five tokens"


@PLAYS
@pytest.mark.parametrize("drafter", [{}, MODEL], ids=["ngram", "model"])
@pytest.mark.parametrize("chance", [0.0, 0.6, 1.0])
@pytest.mark.parametrize(
    "wish",
    [
        {},
        {"n": 3},
        {"repetition_penalty": 1.3, "bad_words_ids": [[3, 4]]},
        {"grammar": "0,2,5:9"},
        {"grammar": "2,3:30:5"},
        {"stop_ids": frozenset({1, 8, 15}), "min_tokens": 4},
        {"logprobs": 1, "prompt_logprobs": 1},
    ],
)
def test_the_tokens_are_those_of_a_run_alone(
    play: type[Play], wish: dict, chance: float, drafter: dict
) -> None:
    some = drafting(play, chance, drafter, num_blocks=40)
    keys = [some.submit([1, 2, 3, key], max_tokens=25, **wish) for key in range(4)]
    some.drain()
    check_streams(some, *keys)
    drafted = sum(row.drafts for batch in some.batches for row in batch.rows)
    if "grammar" not in wish:
        assert drafted > 10
    elif chance == 1.0 and not drafter:
        assert drafted > 3


@PLAYS
def test_the_last_token_is_never_drafted(play: type[Play]) -> None:
    """Nor is one beyond the context."""
    for most in range(1, 8):
        one = drafting(play, max_model_len=9, num_blocks=4)
        key = one.submit([1, 2, 3], max_tokens=most)
        one.drain()
        assert one.got(key)[0] == one.run_alone(key)[0][:6]
        assert max(row.end for batch in one.batches for row in batch.rows) == 2 + min(most, 6)


@pytest.mark.parametrize("grammar", ["", "2,3:12:9"])
@pytest.mark.parametrize("num_blocks", range(12, 20))
@pytest.mark.parametrize("drafter", [{}, MODEL], ids=["ngram", "model"])
@pytest.mark.parametrize("count", [3, 6])
def test_drafts_preempt_nobody(count: int, drafter: dict, num_blocks: int, grammar: str) -> None:
    """Wrong ones, in a cache that is always short: every step is what it would be without, where a
    grammar forces several tokens of others too."""
    options = {"num_blocks": num_blocks, "max_num_seqs": 6, "watermark": 0.0}
    plays = [drafting(Play, 0.0, drafter, **options) for _ in range(2)]
    plays[1].scheduler.policies.drafts._prices = lambda some: NO_DRAFTS
    for one in plays:
        keys = []
        for key in range(count):
            forcing = grammar if key % 3 else ""
            keys.append(one.submit([1, 2, key], n=1 + key % 2, max_tokens=12, grammar=forcing))
        one.drain()
        check_streams(one, *keys)
    rows = [[row for batch in one.batches for row in batch.rows] for one in plays]
    if not grammar:
        assert sum(row.drafts for row in rows[0]) > 2
        assert plays[0].scheduler.live.preemptions > 0
    with_drafts, without = (
        [(row.key, row.index, row.start, row.end - row.drafts) for row in some] for some in rows
    )
    assert with_drafts == without


@pytest.mark.parametrize("priority", [-1, 1])
def test_drafts_leave_prompts_their_tokens(priority: int) -> None:
    """Of one that waits, then runs, at either rank: every step is what it would be without."""
    plays = [drafting(Play, 0.0, {"max_drafts": 16}, max_num_batched_tokens=16) for _ in range(2)]
    plays[1].scheduler.policies.drafts._prices = lambda some: NO_DRAFTS
    for one in plays:
        one.submit([1, 2, 3], max_tokens=30)
        one.step(3)
        one.submit([4] * 40, max_tokens=4, priority=priority)
        one.drain()
    with_drafts, without = (
        [[(row.key, row.start, row.end - row.drafts) for row in each.rows] for each in one.batches]
        for one in plays
    )
    assert with_drafts == without
    assert any(row.drafts > 9 for batch in plays[0].batches for row in batch.rows)


def test_a_proposal_follows_what_was_output() -> None:
    """Not what was sampled where a grammar forced another token, which a draft had right."""
    some = drafting(Play, 1.0, MODEL)
    for key in range(4):
        some.submit([1, 2, 3, key], max_tokens=30, grammar="2,3:30:1")
    proposed = 0
    while some.engine.has_work:
        some.step()
        for one in some.scheduler.live.running:
            made = len(one.output)
            stream = some.prophet.streams[one.request.message.key, 0]
            assert one.runner_proposal == stream[made : made + len(one.runner_proposal)]
            proposed += len(one.runner_proposal)
    assert proposed > 0


@pytest.mark.parametrize("drafter", [{}, MODEL], ids=["ngram", "model"])
def test_lookahead_blocks_go_back(drafter: dict) -> None:
    one = drafting(Play, 0.0, drafter)
    one.submit([1, 2, 3], max_tokens=30)
    for tokens in range(4, 20):
        one.step()
        assert one.scheduler.kv.num_used == -(-tokens // 2)
    assert any(row.drafts == 4 for batch in one.batches for row in batch.rows)


def test_drafts_leave_every_other_sequence_its_token() -> None:
    some = drafting(Play, max_num_batched_tokens=6, max_num_seqs=6)
    keys = [some.submit([1, 2, key], max_tokens=40) for key in range(5)]
    some.drain()
    check_streams(some, *keys)
    assert max(batch.num_tokens for batch in some.batches) == 6
    rows = [len(batch.rows) for batch in some.batches if any(row.drafts for row in batch.rows)]
    assert 5 in rows


@pytest.mark.parametrize("drafter", [{}, MODEL], ids=["ngram", "model"])
def test_drafts_without_blocks_take_no_seconds_of_the_step(drafter: dict) -> None:
    one = drafting(Play, 1.0, drafter, num_blocks=16, watermark=0.0)
    taken: list[tuple[int, int]] = []

    class Limits(NoLimits):
        def take_drafts(self, choice: DraftChoice) -> None:
            taken.append((len(choice.drafts), choice.propose))

    one.scheduler._planner._draft_budget._limits = Limits()
    keys = [one.submit([key, 2, 3], max_tokens=20) for key in range(4)]
    lacking = 0
    while one.engine.has_work:
        taken.clear()
        batches = len(one.batches)
        one.step()
        if len(one.batches) == batches:
            continue
        drafted = [row for row in one.batches[-1].rows if row.drafts or row.propose]
        assert [each for each in taken if each != (0, 0)] == [
            (row.drafts, row.propose) for row in drafted
        ]
        lacking += sum(row.drafts < 4 for row in drafted)
    assert lacking > 0
    check_streams(one, *keys)


def test_a_model_proposes_for_the_next_step() -> None:
    one = drafting(Play, 1.0, MODEL)
    key = one.submit([1, 2, 3], max_tokens=18)
    one.drain()
    check_streams(one, key)
    rows = [row for batch in one.batches for row in batch.rows]
    made = [(row.drafts, row.propose) for row in rows]
    assert made == [(0, 0), (0, 4), (4, 4), (4, 4), (4, 1), (0, 0)]


def test_nothing_overlaps_with_a_step_that_asks() -> None:
    """It is planned when all is known, and launched with nothing in flight; others overlap."""
    some = drafting(overlapped, 0.5, MODEL)
    launch, seen = some.runner.launch, []

    def note(batch):
        seen.append((any(row.propose for row in batch.rows), len(some.runner.in_flight)))
        return launch(batch)

    some.runner.launch = note
    keys = [some.submit([1, 2, 3, key], max_tokens=40) for key in range(2)]
    keys += [some.submit([4, key], max_tokens=40, temperature=0.0) for key in range(6)]
    some.scheduler.policies.drafts._prices = lambda some: (
        Prices(0.0) if len(some) < 4 else NO_DRAFTS
    )
    some.drain()
    check_streams(some, *keys)
    assert {(True, 0), (False, 1)} <= set(seen)
    assert (True, 1) not in seen


@PLAYS
def test_a_try_is_made_beside_others(play: type[Play]) -> None:
    """With overlap it is planned twice: a plan that is dropped spends nothing."""
    some = drafting(play, 0.0, MODEL, num_blocks=2000)
    keys = [some.submit([1, 2, 3, key], max_tokens=120) for key in range(4)]
    some.scheduler.policies.drafts._prices = lambda some: Prices(0.5)
    some.drain()
    check_streams(some, *keys)
    asked = [any(row.propose for row in batch.rows) for batch in some.batches]
    assert sum(asked) == 3, "4 tokens at 0.5 cost 34 times 0.03 times the root of 4"


def test_a_preempted_sequence_is_read_anew() -> None:
    one = drafting(Play, 1.0, MODEL)
    key = one.submit([1, 2, 3], max_tokens=18)
    for _ in range(4):
        one.step()
    (sequence,) = one.scheduler.live.running
    assert sequence.num_read > 0
    one.scheduler.live.preempt(sequence, 1.0)
    assert sequence.num_read == 0, "its blocks are others' now"
    one.drain()
    check_streams(one, key)
