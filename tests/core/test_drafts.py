"""Drafts: the same tokens in fewer steps, nothing that is not accepted, nobody's blocks."""

import pytest
from jitney.config import SpeculationConfig, make_config
from jitney.core.cost import StepCost, StepShape
from jitney.core.drafts import NO_DRAFTS, Prices, Speculation
from jitney.core.request import Drafting, Request, Sequence
from jitney.messages import Batch, Row, RowOutput, Submit, Tokens
from jitney.sampling_params import SamplingParams

from tests.core.play import Play, check_streams, overlapped

PLAYS = pytest.mark.parametrize("play", [Play, overlapped])


MODEL = {"drafter": "draft_model", "model": "m"}


def drafting(play: type[Play], chance: float = 1.0, drafter: dict | None = None, **options) -> Play:
    """Every proposal is computed. ``drafter``: MODEL has the runner make them."""
    speculation = {"max_drafts": 4, **(drafter or {})}
    made = play(**{"speculation": speculation, "block_size": 2, **options})
    made.draft(chance)
    return made


def sequence_of(prompt: list[int], output: list[int], max_tokens: int = 100) -> Sequence:
    submit = Submit(key=0, prompt=prompt, params=SamplingParams(seed=0), arrival=0.0)
    sequence = Sequence(Request(submit, max_tokens, 0, 0.0), 0)
    sequence.output += output
    sequence.num_tokens += len(output)
    sequence.num_planned = sequence.num_tokens - 1
    return sequence


# ---------------------------------------------------------------------- steps


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
    plays[1].scheduler.speculation._prices = lambda some: NO_DRAFTS
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
    plays[1].scheduler.speculation._prices = lambda some: NO_DRAFTS
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
            assert one.proposed == stream[made : made + len(one.proposed)]
            proposed += len(one.proposed)
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
    some.scheduler.speculation._prices = lambda some: Prices(0.0) if len(some) < 4 else NO_DRAFTS
    some.drain()
    check_streams(some, *keys)
    assert {(True, 0), (False, 1)} <= set(seen)
    assert (True, 1) not in seen


@PLAYS
def test_a_try_is_made_beside_others(play: type[Play]) -> None:
    """With overlap it is planned twice: a plan that is dropped spends nothing."""
    some = drafting(play, 0.0, MODEL, num_blocks=2000)
    keys = [some.submit([1, 2, 3, key], max_tokens=120) for key in range(4)]
    some.scheduler.speculation._prices = lambda some: Prices(0.5)
    some.drain()
    check_streams(some, *keys)
    asked = [any(row.propose for row in batch.rows) for batch in some.batches]
    assert sum(asked) == 3, "4 tokens at 0.5 cost 34 times 0.03 times the root of 4"


def with_model(prices: Prices | None = None) -> Speculation:
    """A draft model's, at prices that are given or not known yet."""
    speculation = Speculation(SpeculationConfig(**MODEL), StepCost())
    if prices is not None:
        speculation._prices = lambda some: prices
    return speculation


def asked(speculation: Speculation, running: list[Sequence]) -> list[int]:
    """How many tokens a draft model is to propose for each."""
    speculation.choose(running)
    wanted = [speculation.drafts_of(one)[1] for one in running]
    rows = [Row(0, 0, [1], 0, [], (0,), None, [], [], [], [], propose=each) for each in wanted]
    speculation.note_step(Batch(rows))
    return wanted


def of_acceptance(*chances: float, read: int = 1) -> list[Sequence]:
    """Sequences whose drafts were right so often, for long."""
    running = [sequence_of([1] * 60, [1, 2]) for _ in chances]
    for one, chance in zip(running, chances, strict=True):
        one.drafting = Drafting(compared=1e4, right=chance * 1e4, read=read)
    return running


def test_a_model_that_was_wrong_is_asked_now_and_then() -> None:
    """For one of the sequences: the one of which it has the least to read."""
    speculation = with_model()
    running = of_acceptance(0.01, 0.01)
    running[1].drafting.read = 9
    steps = [asked(speculation, running) for _ in range(130)]
    tries = [step for step, wanted in enumerate(steps) if wanted != [0, 0]]
    assert [steps[step] for step in tries] == [[0, 4]] * len(tries)
    assert tries == [47, 95], "4 tokens at 0.5 cost 47 times 0.03 times the root of 2"


def test_a_try_takes_a_small_share_of_the_time() -> None:
    """Also where there is much to read before."""
    for rows, of_read, least in ((1, 0.1, 200), (16, 0.1, 50), (16, 0.0, 10)):
        prices = Prices(0.05, of_pass=0.5, of_read=of_read)
        speculation, running = with_model(prices), of_acceptance(*[0.01] * rows)
        steps = [sum(asked(speculation, running)) for _ in range(1000)]
        cost = 4 * 0.55 + of_read * 61
        assert 0 < steps.count(4) < 1000 / least
        assert cost * steps.count(4) / (1000 * rows) < 0.031


def test_a_try_that_found_no_row_is_made_in_the_next_step() -> None:
    """As where a plan ahead leaves the sequence out."""
    speculation = with_model()
    running = of_acceptance(0.01)
    for _ in range(70):
        speculation.choose(running)
    assert speculation.drafts_of(running[0])[1] == 4
    assert asked(speculation, running) == [4]
    assert asked(speculation, running) == [0]


def test_who_computes_a_prompt_or_ends_is_not_asked() -> None:
    running = of_acceptance(0.9, 0.9, 0.9)
    running[1].prefill_end = running[1].num_planned + 1
    running[2].limit = running[2].num_tokens + 1
    assert asked(with_model(), running) == [6, 0, 0]


def test_who_has_forced_tokens_to_compute_keeps_nobody_from_asking() -> None:
    running = of_acceptance(0.9, 0.9, read=0)
    running[0] = sequence_of([1] * 30, [1, 2, 3])
    running[0].num_planned -= 2
    assert asked(with_model(), running) == [0, 6]


def test_a_try_that_raises_is_over() -> None:
    """The next one waits as long as after any other."""
    raised = []

    def fault(batch, written: bool) -> None:
        if written and any(row.propose for row in batch.rows):
            raised.append(len(one.batches))
            raise RuntimeError("no memory")

    one = drafting(Play, 0.0, MODEL, num_blocks=2000, faults=fault)
    key = one.submit([1, 2, 3], max_tokens=300)
    one.scheduler.speculation._prices = lambda some: Prices(0.5)
    one.drain()
    check_streams(one, key)
    assert 2 < len(raised) < 6


def test_one_sequence_a_step_is_new_to_the_model() -> None:
    speculation, running = with_model(), of_acceptance(0.9, 0.9, 0.9, read=0)
    running[1] = sequence_of([1] * 30, [1])
    running[1].drafting = Drafting(compared=1e4, right=9e3)
    assert asked(speculation, running) == [0, 6, 0], "the shortest"
    running[1].drafting.read = 31
    assert asked(speculation, running) == [6, 6, 0]
    running[0].drafting.read = 62
    assert asked(speculation, running) == [6, 6, 6]


@pytest.mark.parametrize(
    ("prices", "chances", "wanted"),
    [
        (Prices(0.2), [0.9, 0.5], [8, 2]),
        (Prices(0.2, of_pass=0.5), [0.9, 0.5], [3, 2]),
        (Prices(0.2, of_pass=0.5), [0.9] * 4, [8] * 4),
        (Prices(0.2, of_pass=0.5), [0.6], [0]),
        (Prices(0.2, of_row=2.0), [0.9, 0.5], [8, 0]),
        (Prices(0.2, of_row=5.0), [0.9], [0]),
        (Prices(0.2, of_row=1.5, of_asking=2.5), [0.9], [0]),
        (Prices(0.2, of_read=0.2), [0.9], [8]),
        (Prices(0.2, of_read=0.7), [0.9], [0]),
    ],
    ids=str,
)
def test_a_model_is_asked_where_that_pays(
    prices: Prices, chances: list[float], wanted: list[int]
) -> None:
    """Passes are for all that want them; and what it would read first is paid for until the end."""
    assert asked(with_model(prices), of_acceptance(*chances)) == wanted


def test_what_is_not_known_of_a_sequence_is_taken_from_all() -> None:
    speculation = with_model(Prices(0.5))
    for token in (1, 1, 1, 1, 9, 9, 9, 9):
        before = speculation._chance(Drafting())
        sequence = sequence_of([1] * 60, [1, 2])
        sequence.drafting = Drafting(proposal=[1], made_at=61)
        sequence.output[-1] = token
        speculation.choose([sequence])
        assert (speculation._chance(Drafting()) > before) == (token == 1)
        own = speculation._chance(sequence.drafting)
        assert (own > speculation._chance(Drafting())) == (token == 1)


def test_one_step_in_64_is_without_drafts() -> None:
    """So that what it takes stays known."""
    speculation = Speculation(SpeculationConfig(), learned(10e-3, 1e-3, 0.5e-3))
    running = [sequence_of([1, 2, 3, 1], [2, 3, 1])]
    running[0].drafting = Drafting(compared=1e4, right=9e3)
    taken = []
    for _ in range(129):
        speculation.choose(running)
        taken.append(len(speculation.drafts_of(running[0])[0]))
    rests = [step for step, count in enumerate(taken, 1) if not count]
    assert rests == [1, 65, 129]


def test_before_a_rest_nothing_is_asked_for() -> None:
    speculation = Speculation(SpeculationConfig(**MODEL), learned(10e-3, 1e-3, 0.5e-3))
    wanted = [asked(speculation, of_acceptance(0.9))[0] for _ in range(130)]
    assert [step for step, count in enumerate(wanted, 1) if not count] == [1, 64, 65, 128, 129]


@pytest.mark.parametrize("times", [4, 20])
@pytest.mark.parametrize("rows", [1, 8])
def test_a_first_step_that_was_held_up_does_not_end_drafts(rows: int, times: int) -> None:
    cost = learned(10e-3, 0.1e-3, 0.1e-3)
    speculation = Speculation(SpeculationConfig(), cost)
    running = [sequence_of([1, 2, 3, 1], [2, 3, 1]) for _ in range(rows)]
    drafted, held_up = [], times
    for step in range(4000):
        for one in running:
            one.drafting = Drafting(compared=1e4, right=9e3)
        speculation.choose(running)
        counts = [len(speculation.drafts_of(one)[0]) for one in running]
        some = [Row(0, 0, [1], 0, [], (0,), None, [], [], [], [], drafts=each) for each in counts]
        speculation.note_step(Batch(some))
        shape = StepShape(1.0, 0.0, rows, rows, 60.0, sum(map(bool, counts)), sum(counts))
        seconds = 10e-3 + 0.2e-3 * (rows + sum(counts))
        cost.add(shape, seconds * (held_up if sum(counts) else 1))
        held_up = 1 if sum(counts) else held_up
        drafted += [step] * (sum(counts) == 8 * rows)
    assert len(drafted) > 1500


# ---------------------------------------------------------------------- the n-gram drafter


def follow(speculation: Speculation, sequence: Sequence) -> Drafting:
    speculation._prices = lambda some: Prices(0.9)
    speculation.choose([sequence])
    return sequence.drafting


def propose(prompt: list[int], output: list[int], most: int = 4) -> list[int]:
    speculation = Speculation(SpeculationConfig(max_drafts=most), StepCost())
    return follow(speculation, sequence_of(prompt, output)).proposal


@pytest.mark.parametrize(
    ("prompt", "output", "proposal"),
    [
        ([1, 2, 3, 4, 5, 6, 7], [1, 2], [3, 4, 5, 6]),
        ([1, 2, 3, 4, 5], [1, 2], [3, 4, 5, 1]),  # as if the text went round
        ([1, 2, 3], [4, 5], []),
        ([9, 1, 2, 5, 8, 1, 2, 6], [9, 1, 2], [5, 8, 1, 2]),  # the longer match
        ([1, 2, 5, 8, 1, 2, 6, 7], [1, 2], [6, 7, 1, 2]),  # of equals the latest
        ([1], [7, 7, 7], [7, 7, 7, 7]),
        ([1], [2], []),
    ],
)
def test_what_followed_before(prompt: list[int], output: list[int], proposal: list[int]) -> None:
    assert propose(prompt, output) == proposal


def test_an_index_grows_with_the_text() -> None:
    speculation = Speculation(SpeculationConfig(), StepCost())
    text = [int(each) for each in "31415926535897932384626433832795028841971" * 2]
    sequence = sequence_of(text[:10], text[10:11])
    for token in text[11:]:
        sequence.output.append(token)
        sequence.num_tokens += 1
        grown = follow(speculation, sequence).proposal
        assert grown == propose(text[:10], sequence.output, most=8)


def test_a_long_prompt_is_indexed_in_parts() -> None:
    sequence = sequence_of([*range(3000)], [1, 2])
    speculation = Speculation(SpeculationConfig(max_drafts=2), StepCost())
    proposals = []
    for token in (3, 4, 5, 6):
        proposals.append(follow(speculation, sequence).proposal)
        sequence.output.append(token)
        sequence.num_tokens += 1
    assert proposals == [[], [], [5, 6], [6, 7]]


# ---------------------------------------------------------------------- what pays


def learned(step: float, token: float, sample: float) -> StepCost:
    """Of steps that follow these costs to the letter, decodes and prompts."""
    cost = StepCost()
    for i in range(64):
        shape = StepShape(1.0, 0.0, 1 + i % 7, 1 + i % 7, 50 + i)
        if i % 3 == 0:
            shape = StepShape(1.0, 1.0, 100.0 + i, 1.0, 100.0 + i)
        cost.add(shape, step + token * shape.tokens + sample * shape.samples)
    return cost


def test_the_cost_of_a_step_is_learned() -> None:
    cost = learned(10e-3, 1e-3, 0.5e-3)
    assert cost.weights.tokens + cost.weights.samples == pytest.approx(1.5e-3, rel=0.05)
    shape = StepShape(1.0, 0.0, 20.0, 20.0, 60.0)
    assert cost.seconds(shape) == pytest.approx(40e-3, rel=0.05)
    assert StepCost().seconds(shape) == 0.0


def test_what_a_draft_model_did_is_part_of_a_step() -> None:
    one = drafting(Play, 1.0, MODEL)
    one.submit([1, 2, 3], max_tokens=18)
    one.drain()
    batch = max(one.batches, key=lambda batch: batch.num_tokens)
    outputs = [RowOutput([1], proposal=[2, 3], read=7), RowOutput([1], proposal=[4], read=2)]
    assert StepShape.of(batch, outputs)[:7] == StepShape.of(batch)[:7]
    assert StepShape.of(batch, outputs)[7:] == (2, 2, 9)
    assert StepShape.of(batch)[7:] == (0, 0, 0)
    assert StepShape.of(batch)[:7] == (1, 0, 1, 1, batch.rows[0].start + 1, 1, 4)


def test_what_drafts_add_is_learned_apart() -> None:
    """Steps that all have drafts do not change what one without would take."""
    cost = learned(10e-3, 1e-3, 0.5e-3)
    plain = StepShape(1.0, 0.0, 4.0, 4.0, 60.0)
    before = cost.seconds(plain)
    for i in range(99):
        drafts, passes = i % 7, i % 5
        shape = plain._replace(drafted=drafts > 0, drafts=drafts, asked=1.0, passes=passes)
        cost.add(shape, 17e-3 + 0.2e-3 * drafts + 3e-3 * passes)
    assert cost.seconds(plain) == before
    full = plain._replace(drafted=1.0, drafts=6.0, asked=1.0, passes=2.0)
    assert cost.seconds(full) == pytest.approx(24.2e-3, rel=0.02)
    assert cost.weights.passes == pytest.approx(3e-3, rel=0.1)


def test_a_step_that_was_held_up_moves_little() -> None:
    cost = learned(10e-3, 1e-3, 0.5e-3)
    shape = StepShape(1.0, 0.0, 4.0, 4.0, 60.0)
    before = cost.seconds(shape)
    for _ in range(8):
        cost.add(shape, 5.0)
    assert cost.seconds(shape) < 1.2 * before


@pytest.mark.parametrize(("rows", "acceptance", "drafts"), [(1, 0.9, 8), (1, 0.1, 0), (64, 0.9, 0)])
def test_drafts_are_taken_where_they_pay(rows: int, acceptance: float, drafts: int) -> None:
    cost = learned(10e-3, 1e-3, 0.5e-3)
    cost.add(StepShape(1.0, 0.0, 1.0, 1.0, 50.0, 1.0, 8.0), 11.5e-3 + 8 * 1.5e-3)
    speculation = Speculation(SpeculationConfig(), cost)
    running = [sequence_of([1, 2, 3, 1], [2, 3, 1]) for _ in range(rows)]
    for one in running:
        one.drafting = Drafting(compared=1e4, right=acceptance * 1e4)
    speculation.choose(running)  # the first step has none
    speculation.choose(running)
    assert {len(speculation.drafts_of(one)[0]) for one in running} == {drafts}


def test_acceptance_follows_what_no_step_computed() -> None:
    """So a batch that was full learns that drafts would be right."""
    speculation = Speculation(SpeculationConfig(), StepCost())
    for token, rises in ((1, True), (9, False)):
        sequence = sequence_of([1, 2, 3, 1], [2, 3])
        before = speculation._chance(follow(speculation, sequence))
        sequence.output.append(token)
        sequence.num_tokens += 1
        assert (speculation._chance(follow(speculation, sequence)) > before) == rises


def test_speculation_is_off_by_default() -> None:
    assert make_config({"model": "m"}).speculation is None
