"""Which drafts are taken, and who asks a draft model: where that pays by what is learned."""

import pytest
from jitney.batch import Row, RowOutput
from jitney.config import SpeculationConfig
from jitney.core.drafting import Drafting
from jitney.core.policy.cost import StepCost, StepShape
from jitney.core.policy.plain import NoLimits
from jitney.core.policy.prices import Prices
from jitney.core.policy.seam import DraftChoice
from jitney.core.policy.speculation import Speculation
from jitney.core.request import Request, Sequence
from jitney.messages import Submit
from jitney.read_config import make_config
from jitney.sampling_params import SamplingParams

from tests.core.play import MODEL, Play, check_streams, drafting


def sequence_of(prompt: list[int], output: list[int], max_tokens: int = 100) -> Sequence:
    submit = Submit(key=0, prompt=prompt, params=SamplingParams(seed=0), arrival=0.0)
    sequence = Sequence(Request(submit, max_tokens, 0, 0.0), 0)
    sequence.output += output
    sequence.num_tokens += len(output)
    sequence.num_planned = sequence.num_tokens - 1
    return sequence


def with_model(prices: Prices | None = None) -> Speculation:
    """A draft model's, at prices that are given or not known yet."""
    speculation = Speculation(SpeculationConfig(**MODEL), StepCost())
    if prices is not None:
        speculation._prices = lambda some: prices
    return speculation


def choice_of(speculation: Speculation, sequence: Sequence) -> DraftChoice:
    """With a budget for anything."""
    return speculation.choice_of(sequence, most=99, most_read=9999)


def asked(speculation: Speculation, running: list[Sequence]) -> list[int]:
    """How many tokens a draft model is to propose for each."""
    speculation.begin(running, NoLimits())
    wanted = [choice_of(speculation, one).propose for one in running]
    rows = [Row(0, 0, [1], 0, [], (0,), None, [], [], [], [], propose=each) for each in wanted]
    speculation.note_rows(rows)
    return wanted


def of_acceptance(*chances: float, read: int = 1) -> list[Sequence]:
    """Sequences whose drafts were right so often, for long."""
    running = [sequence_of([1] * 60, [1, 2]) for _ in chances]
    for one, chance in zip(running, chances, strict=True):
        one.drafting = Drafting(compared=1e4, right=chance * 1e4)
        one.num_read = read
    return running


def test_a_model_that_was_wrong_is_asked_now_and_then() -> None:
    """For one of the sequences: the one of which it has the least to read."""
    speculation = with_model()
    running = of_acceptance(0.01, 0.01)
    running[1].num_read = 9
    steps = [asked(speculation, running) for _ in range(130)]
    tries = [step for step, wanted in enumerate(steps) if wanted != [0, 0]]
    assert [steps[step] for step in tries] == [[0, 4]] * len(tries)
    assert tries == [47, 95], "4 tokens at 0.5 cost 47 times 0.03 times the root of 2"


def test_a_try_takes_a_small_share_of_the_time() -> None:
    """Also where there is much to read before."""
    for rows, of_read, least in ((1, 0.1, 200), (16, 0.1, 50), (16, 0.0, 10)):
        prices = Prices(0.05, model_pass=0.5, read_token=of_read)
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
        speculation.begin(running, NoLimits())
    assert choice_of(speculation, running[0]).propose == 4
    assert asked(speculation, running) == [4]
    assert asked(speculation, running) == [0]


def test_who_computes_a_prompt_or_ends_is_not_asked() -> None:
    running = of_acceptance(0.9, 0.9, 0.9)
    running[1].decodes_from = running[1].num_planned + 1
    running[2].max_computed = running[2].num_tokens + 1
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
    one.scheduler.policies.drafts._prices = lambda some: Prices(0.5)
    one.drain()
    check_streams(one, key)
    assert 2 < len(raised) < 6


def test_one_sequence_a_step_is_new_to_the_model() -> None:
    speculation, running = with_model(), of_acceptance(0.9, 0.9, 0.9, read=0)
    running[1] = sequence_of([1] * 30, [1])
    running[1].drafting = Drafting(compared=1e4, right=9e3)
    assert asked(speculation, running) == [0, 6, 0], "the shortest"
    running[1].num_read = 31
    assert asked(speculation, running) == [6, 6, 0]
    running[0].num_read = 62
    assert asked(speculation, running) == [6, 6, 6]


@pytest.mark.parametrize(
    ("prices", "chances", "wanted"),
    [
        (Prices(0.2), [0.9, 0.5], [8, 2]),
        (Prices(0.2, model_pass=0.5), [0.9, 0.5], [3, 2]),
        (Prices(0.2, model_pass=0.5), [0.9] * 4, [8] * 4),
        (Prices(0.2, model_pass=0.5), [0.6], [0]),
        (Prices(0.2, drafting_row=2.0), [0.9, 0.5], [8, 0]),
        (Prices(0.2, drafting_row=5.0), [0.9], [0]),
        (Prices(0.2, drafting_row=1.5, asking_row=2.5), [0.9], [0]),
        (Prices(0.2, read_token=0.2), [0.9], [8]),
        (Prices(0.2, read_token=0.7), [0.9], [0]),
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
        speculation.begin([sequence], NoLimits())
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
        speculation.begin(running, NoLimits())
        taken.append(len(choice_of(speculation, running[0]).drafts))
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
        speculation.begin(running, NoLimits())
        counts = [len(choice_of(speculation, one).drafts) for one in running]
        some = [Row(0, 0, [1], 0, [], (0,), None, [], [], [], [], drafts=each) for each in counts]
        speculation.note_rows(some)
        shape = StepShape(1.0, 0.0, rows, rows, 60.0, sum(map(bool, counts)), sum(counts))
        seconds = 10e-3 + 0.2e-3 * (rows + sum(counts))
        cost.add(shape, seconds * (held_up if sum(counts) else 1))
        held_up = 1 if sum(counts) else held_up
        drafted += [step] * (sum(counts) == 8 * rows)
    assert len(drafted) > 1500


# ---------------------------------------------------------------------- the n-gram drafter


def follow(speculation: Speculation, sequence: Sequence) -> Drafting:
    speculation._prices = lambda some: Prices(0.9)
    speculation.begin([sequence], NoLimits())
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
    sequence = sequence_of([*range(1400)], [1, 2])
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
    assert cost.weights.token + cost.weights.sample == pytest.approx(1.5e-3, rel=0.05)
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
        shape = plain._replace(
            drafting_rows=drafts > 0, draft_tokens=drafts, asking_rows=1.0, model_passes=passes
        )
        cost.add(shape, 17e-3 + 0.2e-3 * drafts + 3e-3 * passes)
    assert cost.seconds(plain) == before
    full = plain._replace(drafting_rows=1.0, draft_tokens=6.0, asking_rows=1.0, model_passes=2.0)
    assert cost.seconds(full) == pytest.approx(24.2e-3, rel=0.02)
    assert cost.weights.model_pass == pytest.approx(3e-3, rel=0.1)


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
    speculation.begin(running, NoLimits())  # the first step has none
    speculation.begin(running, NoLimits())
    assert {len(choice_of(speculation, one).drafts) for one in running} == {drafts}


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
