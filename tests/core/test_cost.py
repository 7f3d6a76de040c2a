"""The cost of a step: fitted while the first steps run, and then only where predictions are off."""

import random
from collections.abc import Iterator

import pytest
from jitney.core.policy.cost import StepCost, StepShape
from jitney.core.policy.least_squares import Point, dot, fit

TRUE = StepShape(steps=8e-3, any_chunk=1e-3, tokens=0.1e-3, samples=0.2e-3, context=0.3e-6)


def shape_of(rows: int, chunk: int = 0) -> StepShape:
    return StepShape(
        any_chunk=1.0 if chunk else 0.0,
        tokens=rows + chunk,
        samples=rows,
        context=200 * rows + chunk,
    )


def shapes(count: int, most_rows: int = 32) -> Iterator[StepShape]:
    chance = random.Random(3)
    for _ in range(count):
        chunk = chance.choice([0, 0, 0, chance.randrange(30, 200)])
        yield shape_of(chance.randrange(1, most_rows + 1), chunk)


def seconds_of(shape: StepShape) -> float:
    return sum(a * b for a, b in zip(TRUE, shape, strict=True))


def test_it_is_known_after_the_first_steps_and_stays() -> None:
    cost = StepCost()
    for shape in shapes(64):
        cost.add(shape, seconds_of(shape))
    fitted = cost.weights
    chance = random.Random(5)
    for shape in shapes(500):
        assert cost.seconds(shape) == pytest.approx(seconds_of(shape), rel=0.02)
        cost.add(shape, seconds_of(shape) * chance.uniform(0.96, 1.04))
    assert cost.weights == fitted, "such noise makes no prediction off in the mean"


@pytest.mark.parametrize("slower", [0.6, 1.5])
def test_it_is_fitted_anew_when_it_is_off(slower: float) -> None:
    cost = StepCost()
    for shape in shapes(200):
        cost.add(shape, seconds_of(shape))
    for shape in shapes(400):
        cost.add(shape, slower * seconds_of(shape))
    for shape in shapes(50):
        assert cost.seconds(shape) == pytest.approx(slower * seconds_of(shape), rel=0.1)


def test_chunks_that_are_off_count_though_most_steps_have_none() -> None:
    cost = StepCost()
    for _ in range(64):
        cost.add(shape_of(8), seconds_of(shape_of(8)))
    for step in range(400):
        shape = shape_of(8, chunk=100 if step % 10 == 0 else 0)
        cost.add(shape, seconds_of(shape))
    chunk = shape_of(8, chunk=100)
    assert cost.seconds(chunk) == pytest.approx(seconds_of(chunk), rel=0.05)


def test_a_full_batch_does_not_forget_what_one_row_takes() -> None:
    cost = StepCost()
    for shape in shapes(200):
        cost.add(shape, seconds_of(shape))
    chance = random.Random(5)
    for _ in range(3000):
        shape = shape_of(32)
        cost.add(shape, seconds_of(shape) * chance.uniform(0.9, 1.1))
    assert cost.seconds(shape_of(1)) == pytest.approx(seconds_of(shape_of(1)), rel=0.15)


def test_a_step_that_took_no_time_is_none() -> None:
    cost = StepCost()
    cost.add(shape_of(1), 0.0)
    assert cost.weights is None


def test_no_weight_is_negative() -> None:
    points = [Point((1.0, x), y, 1.0) for x, y in ((1.0, 1.0), (2.0, 0.5), (3.0, 0.2))]
    weights = fit(points, prior=(0.0, 0.0), precision=(1e-9, 1e-9))
    assert weights[1] == 0.0
    assert weights[0] == pytest.approx(1.7 / 3, rel=1e-6)


def test_a_weight_that_no_step_tells_stays() -> None:
    points = [Point((1.0, 0.0), 2.0, 1.0)]
    weights = fit(points, prior=(0.5, 0.7), precision=(1e-9, 1e-9))
    assert weights == pytest.approx([2.0, 0.7])
    assert dot(weights, (1.0, 1.0)) == pytest.approx(2.7)


def test_what_a_draft_model_costs_does_not_fade_while_it_is_not_asked() -> None:
    """Else a draft model that does not pay looks cheaper with each step that leaves it alone."""
    cost = StepCost()
    plain = shape_of(8)
    drafting = plain._replace(
        drafting_rows=8, draft_tokens=16, asking_rows=8, model_passes=2, tokens_read=24
    )
    for step in range(64):
        cost.add(plain, seconds_of(plain))
        cost.add(drafting, seconds_of(plain) + 2e-3 + 0.1e-3 * (step % 2))
    before = cost.weights
    assert before is not None
    for _ in range(2000):
        cost.add(plain, seconds_of(plain))
    after = cost.weights
    assert after is not None
    asking = ("asking_row", "model_pass", "read_token")
    assert [getattr(after, name) for name in asking] == [getattr(before, name) for name in asking]
    assert sum(getattr(before, name) for name in asking) > 0
    assert after.drafting_row + after.draft <= before.drafting_row + before.draft


def test_what_drafts_add_is_judged_by_what_is_known_of_plain_steps_by_now() -> None:
    """The first steps have drafts: what they take is not the drafts' alone, as later steps show."""
    cost = StepCost()
    plain = shape_of(8)
    drafting = plain._replace(drafting_rows=8, draft_tokens=16)
    for _ in range(3):
        cost.add(drafting, seconds_of(plain) + 2e-3)
    for shape in shapes(64):
        cost.add(shape, seconds_of(shape))
    cost.add(drafting, seconds_of(plain) + 2e-3)  # the fourth: their weights are fitted anew
    assert cost.seconds(drafting) - cost.seconds(plain) == pytest.approx(2e-3, rel=0.1)


def test_a_weight_that_no_step_tells_stays_as_it_was() -> None:
    points = [Point((1.0, 0.0), 2.0, 1.0)]
    assert fit(points, prior=[0.0, 5.0], precision=[1e-6, 1e-6]) == pytest.approx([2.0, 5.0])
