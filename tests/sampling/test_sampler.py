"""The sampler against a plain statement of vLLM's semantics, one row at a time."""

import math
import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from jitney.batch import Row
from jitney.errors import InternalError, InvalidArgumentError
from jitney.execution import filters, sampler
from jitney.execution.filters import _weights
from jitney.execution.logits_processors import _occurrences, process_logits
from jitney.execution.philox import uniforms
from jitney.execution.row_samples import sampled_rows
from jitney.execution.sampler import prompt_logprobs
from jitney.sampling_params import SamplingParams
from jitney.token_counts import TokenCounts

from tests.sampling.rows import Allows, Long, make_row, sampled


def logits_of(rows: int, vocab: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


# ------------------------------------------------------------------------------- greedy and errors


def test_greedy_is_argmax_in_any_dtype() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        logits = logits_of(5, 100).to(dtype)
        rows = [(make_row(temperature=0), 0)] * 5
        assert [each.token_id for each in sampled(logits, rows)] == logits.argmax(-1).tolist()


def test_plain_greedy_rows_do_no_sampling_work(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise AssertionError("sampling work for a greedy batch")

    for name in ("choose_tokens", "process_logits", "compute_logprobs"):
        monkeypatch.setattr(sampler, name, fail)
    assert len(sampled(logits_of(3, 50), [(make_row(temperature=0), 0)] * 3)) == 3


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_broken_logits_fail_their_row_alone(value: float, temperature: float) -> None:
    logits = logits_of(3, 700)
    expected = sampled(logits, [(make_row(temperature=temperature, top_p=0.9, logprobs=1), 0)] * 3)
    logits[1, 30] = value
    got = sampled(logits, [(make_row(temperature=temperature, top_p=0.9, logprobs=1), 0)] * 3)
    assert isinstance(got[1].error, InternalError)
    assert "not finite" in str(got[1].error)
    assert got[0] == expected[0]
    assert got[2] == expected[2]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_grammar_allows_tokens_in_its_rows_alone(temperature: float) -> None:
    logits = logits_of(4, 70)
    plain = make_row(temperature=temperature)
    (expected,) = sampled(logits[:1], [(plain, 0)])
    masked = [
        make_row(temperature=temperature, grammar=Allows(*ids))
        for ids in ((3, 68), (9,), (75,), ())
    ]
    got = sampled(logits[[0, 1, 2, 3]], [(plain, 0), *((row, 0) for row in masked[:3])])
    assert got[0] == expected
    assert got[1].token_id in (3, 68)
    assert got[2].token_id == 9
    assert "structured_outputs" in str(got[3].error)  # its one id is none of the model's
    together = sampled(logits[[1, 2, 3, 3]], [(row, 0) for row in masked])
    assert [one.token_id for one in together[:2]] == [got[1].token_id, 9]
    assert together[0].logprobs is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_greedy_row_of_a_grammar_takes_the_first_of_the_best_allowed(dtype: torch.dtype) -> None:
    chance = random.Random(0)
    sets = [sorted(chance.sample(range(100), chance.choice((1, 3, 40, 99)))) for _ in range(40)]
    logits = logits_of(40, 100).round().to(dtype)  # many are equal
    logits[7, sets[7]] = -math.inf
    logits[8, [id for id in range(100) if id not in sets[8]]] = math.nan
    rows = [(make_row(temperature=0, grammar=Allows(*ids, size=128)), 0) for ids in sets]
    got = sampled(logits, rows)
    best = [max(ids, key=lambda id, i=i: logits[i, id].item()) for i, ids in enumerate(sets)]
    assert [each.token_id for each in got] == [-1 if i == 7 else id for i, id in enumerate(best)]
    assert isinstance(got[7].error, InvalidArgumentError)


def test_a_grammar_leaves_logprobs_as_they_are() -> None:
    row = make_row(temperature=0, logprobs=2, grammar=Allows(5))
    logits = logits_of(1, 70)
    (got,) = sampled(logits, [(row, 0)])
    assert got.logprobs[0].token_id == 5
    assert math.isclose(got.logprobs[0].logprob, logits[0].log_softmax(-1)[5].item(), abs_tol=1e-5)


def test_everything_forbidden_is_an_error_of_the_row() -> None:
    row = make_row(allowed_token_ids=(3,), bad_words_ids=[[3]])
    (got,) = sampled(logits_of(1, 10), [(row, 0)])
    assert isinstance(got.error, InvalidArgumentError), "the request is at fault"
    assert "forbid every token" in str(got.error)


# ------------------------------------------------------------------------------- constraints


def allowed(logits: torch.Tensor, row: Row) -> set[int]:
    """Ids that may be drawn at all: greedy over copies in which each id in turn is lifted."""
    vocab = logits.shape[1]
    lifted = logits.repeat(vocab, 1)
    lifted[range(vocab), range(vocab)] = 50.0
    return {each.token_id for each in sampled(lifted, [(row, 0)] * vocab)}


def test_allowed_token_ids() -> None:
    row = make_row(temperature=0, allowed_token_ids=(2, 7, 7, 9))
    assert allowed(logits_of(1, 12), row) == {2, 7, 9}


def test_bad_words_follow_their_beginning_in_the_output_only() -> None:
    words = [[1], [2, 3], [4, 5, 6]]
    everything = set(range(10))

    def forbidden(prompt: list[int], output: list[int]) -> set[int]:
        row = make_row(temperature=0, prompt=prompt, output=output, bad_words_ids=words)
        return everything - allowed(logits_of(1, 10), row)

    assert forbidden([2], []) == {1}
    assert forbidden([0], [2]) == {1, 3}
    assert forbidden([0], [4, 5]) == {1, 6}
    assert forbidden([4], [5]) == {1}


def test_min_tokens_forbids_stop_ids_until_they_are_made() -> None:
    def possible(made: int) -> set[int]:
        row = make_row(
            temperature=0, output=[5] * made, min_tokens=2, stop_ids=frozenset({0, 3}), max_tokens=9
        )
        return allowed(logits_of(1, 6), row)

    assert possible(0) == possible(1) == {1, 2, 4, 5}
    assert possible(2) == set(range(6))


def test_min_tokens_counts_a_token_that_is_still_in_flight() -> None:
    """A row whose one token the step before samples: ``output`` is one behind."""
    row = make_row(
        temperature=0, output=[5, 5], min_tokens=2, stop_ids=frozenset({0, 3}), max_tokens=9
    )
    row.output.pop()
    row.token_ids, row.carried = [0], 0
    assert row.end - len(row.prompt) == 2
    assert allowed(logits_of(1, 6), row) == set(range(6))
    row.params = make_row(temperature=0, min_tokens=3, max_tokens=9).params
    assert allowed(logits_of(1, 6), row) == {1, 2, 4, 5}


def test_a_repeated_token_is_penalized_once_and_by_its_own_row() -> None:
    logits = torch.tensor([[2.0, -2.0, 3.0, 4.0]] * 3)
    rows = [
        make_row([0, 0, 1], [0, 3, 3], repetition_penalty=2.0),
        make_row([2], [2]),
        make_row([1, 1], repetition_penalty=4.0),
    ]
    process_logits(logits, rows)
    assert logits.tolist() == [
        [1.0, -4.0, 3.0, 2.0],
        [2.0, -2.0, 3.0, 4.0],
        [2.0, -8.0, 3.0, 4.0],
    ]


@pytest.mark.parametrize("num_drafts", [0, 3])
def test_penalties_cost_nothing_for_each_token_of_a_context(num_drafts: int) -> None:
    """They need its distinct tokens, which are counted when they come."""
    prompt = [0, 1] * 30
    output = [3, 3, 4] * 30
    penalties = {"repetition_penalty": 2.0, "presence_penalty": 0.5, "frequency_penalty": 0.25}
    row = make_row(prompt, output, bad_words_ids=[[4, 3, 6]], **penalties)
    drafts = [3, 6, 5][:num_drafts]
    row.token_ids += drafts
    row.drafts = num_drafts
    row.prompt = Long(prompt)
    row.output = Long(output)
    rows = [each for each, _ in sampled_rows(row)]
    logits = logits_of(1 + num_drafts, 8)
    expected = []
    for count, of_row in enumerate(logits.tolist()):
        alone = make_row(prompt, output + drafts[:count], **penalties)
        expected.append(reference_logits(of_row, alone))
        if (output + drafts[:count])[-2:] == [4, 3]:
            expected[-1][6] = -math.inf
    process_logits(logits, rows)
    assert torch.allclose(logits, torch.tensor(expected))
    assert len(rows) == 1 + num_drafts


def occurrences_of(counts: TokenCounts) -> dict[int, int]:
    found = _occurrences(counts)
    assert len(set(found.token_ids.tolist())) == len(found.token_ids)
    return dict(zip(found.token_ids.tolist(), found.counts.tolist(), strict=True))


def test_counts_of_drafts_are_not_kept() -> None:
    counts = TokenCounts.of([1, 2], [5, 6, 5])
    ahead = counts.after([6, 7])
    twice = ahead.after([7, 5, 8])
    assert occurrences_of(ahead) == {5: 2, 6: 2, 7: 1}
    assert occurrences_of(twice) == Counter([5, 6, 5, 6, 7, 7, 5, 8])
    counts.add([8])
    assert occurrences_of(counts) == {5: 2, 6: 1, 8: 1}


def test_the_counts_after_some_drafts_copy_no_counts() -> None:
    counts = TokenCounts.of([1, 2], [5, 6, 5])
    ahead = counts.after([6]).after([7])
    assert ahead.output_ids is counts.output_ids
    assert ahead.output_counts is counts.output_counts
    assert ahead.prompt_ids is counts.prompt_ids


def reference_logits(logits: list[float], row: Row) -> list[float]:
    """vLLM's order and formulas, in Python floats."""
    params, result = row.params, list(logits)
    if params.allowed_token_ids is not None:
        result = [x if t in params.allowed_token_ids else -math.inf for t, x in enumerate(result)]
    for token, bias in (params.logit_bias or {}).items():
        result[token] += bias
    if len(row.output) < params.min_tokens:
        for token in row.stop_ids:
            result[token] = -math.inf
    for token in set(row.prompt + row.output):
        factor = params.repetition_penalty
        result[token] = result[token] / factor if result[token] > 0 else result[token] * factor
    for token, count in Counter(row.output).items():
        result[token] -= count * params.frequency_penalty + params.presence_penalty
    return result


def reference_weights(logits: list[float], params: SamplingParams) -> list[float]:
    """Temperature, min_p, top_k, top_p as vLLM defines them (ties aside)."""
    top = max(logits)
    weights = [math.exp((x - top) / params.temperature) for x in logits]
    weights = [w if w >= params.min_p else 0.0 for w in weights]
    if params.top_k > 0:
        cut = sorted(weights, reverse=True)[: params.top_k][-1]
        weights = [w if w >= cut else 0.0 for w in weights]
    if params.top_p < 1.0:
        share, before = params.top_p * sum(weights), 0.0
        for token in sorted(range(len(weights)), key=lambda t: -weights[t]):
            before, weights[token] = (
                before + weights[token],
                weights[token] if before < share else 0.0,
            )
    return weights


PARAMS = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.3, 1.0, 1.7]),
        "top_p": st.sampled_from([0.2, 0.77, 0.95, 1.0]),
        "top_k": st.sampled_from([-1, 0, 1, 5, 40, 10_000]),
        "min_p": st.sampled_from([0.0, 0.05, 0.5, 1.0]),
        "presence_penalty": st.sampled_from([0.0, 0.7, -1.0]),
        "frequency_penalty": st.sampled_from([0.0, 0.3]),
        "repetition_penalty": st.sampled_from([1.0, 1.3, 0.5]),
        "logit_bias": st.sampled_from([None, {3: 2.5, 8: -4.0}]),
        "allowed_token_ids": st.sampled_from([None, tuple(range(0, 60, 2))]),
        "min_tokens": st.sampled_from([0, 5]),
        "seed": st.integers(0, 1 << 62),
    }
)


@settings(max_examples=80)
@given(params=PARAMS, noise=st.integers(0, 1000), output=st.lists(st.integers(0, 59), max_size=8))
def test_draw_equals_the_plain_statement(params: dict, noise: int, output: list[int]) -> None:
    row = make_row(
        prompt=[1, 3, 3], output=output, stop_ids=frozenset({0, 4}), max_tokens=50, **params
    )
    logits = logits_of(1, 60, noise)
    (got,) = sampled(logits, [(row, 2)])
    weights = reference_weights(reference_logits(logits[0].tolist(), row), row.params)
    # Of so few tokens all lie in one chunk, and the first number, which finds it, plays no part.
    target = uniforms([row.params.seed], [2], [row.end])[0, 1] * sum(weights)
    running, near = 0.0, []
    for token, weight in enumerate(weights):
        if weight and running - 1e-5 * sum(weights) <= target <= running + weight * (1 + 1e-5):
            near.append(token)
        running += weight
    assert got.token_id in near


# ------------------------------------------------------------------------------- the draw


def test_rounding_changes_hardly_a_draw() -> None:
    """Of 4,000 draws over 4,096 tokens, of logits that differ in their last bits."""
    rows = [(make_row(seed=seed, temperature=1), 0) for seed in range(400)]
    changed = 0
    for turn in range(10):
        logits = logits_of(len(rows), 4096, turn)
        noise = torch.randn(logits.shape, generator=torch.Generator().manual_seed(turn)) * 1e-6
        pair = (sampled(each, rows) for each in (logits, logits + noise * logits.abs()))
        changed += sum(a.token_id != b.token_id for a, b in zip(*pair, strict=True))
    assert changed <= 1


@pytest.mark.parametrize("vocab", [7, 128, 129, 40_000])
def test_batch_never_changes_a_draw(vocab: int) -> None:
    """The same rows alone, together, reversed and among other neighbours: the same tokens."""
    kinds: list[dict[str, object]] = [
        {},
        {"top_k": 5},
        {"top_p": 0.9},
        {"top_p": 0.999, "temperature": 3.0},
        {"min_p": 0.1, "top_p": 0.5, "top_k": 20},
        {"temperature": 0},
        {"repetition_penalty": 1.2, "output": [1, 2, 2]},
        {"logit_bias": {1: 5.0}, "logprobs": 3},
        {"allowed_token_ids": (1, 2, 5)},
        {"temperature": 1e-4},
    ]
    pairs = [
        (make_row(seed=seed, prompt=[1] * (1 + seed % 9), **kind), seed % 3)
        for seed, kind in enumerate(kinds * 2)
    ]
    logits = logits_of(len(pairs), vocab)
    alone = [sampled(logits[i : i + 1], [pair])[0] for i, pair in enumerate(pairs)]
    assert sampled(logits, pairs) == alone
    assert sampled(logits.flip(0), pairs[::-1]) == alone[::-1]
    assert sampled(logits[5:17], pairs[5:17]) == alone[5:17]
    plain = [(make_row(temperature=0), 0)] * len(pairs)
    mixed = sampled(torch.cat((logits, logits)), pairs + plain)
    assert mixed[: len(pairs)] == alone


def test_distribution_by_chi_square() -> None:
    """8,000 draws over 600 tokens (two chunks), each at its own position; 5 standard deviations
    of the statistic's normal limit."""
    count, vocab = 8_000, 600
    logits = logits_of(1, vocab)
    expected = torch.softmax(logits[0].double(), 0) * count
    pairs = [(make_row(prompt=[1] * (index + 1), seed=11), 0) for index in range(200)]
    got: Counter[int] = Counter()
    for index in range(count // 200):
        drawn = sampled(logits.expand(200, vocab), [(row, index) for row, _ in pairs])
        got.update(each.token_id for each in drawn)
    statistic, cells, rest_expected, rest_got = 0.0, 0, 0.0, 0
    for token in range(vocab):
        if expected[token] < 10:
            rest_expected += float(expected[token])
            rest_got += got[token]
        else:
            statistic += (got[token] - float(expected[token])) ** 2 / float(expected[token])
            cells += 1
    statistic += (rest_got - rest_expected) ** 2 / rest_expected
    assert abs(statistic - cells) < 5 * math.sqrt(2 * cells)


def test_top_p_wider_than_the_sorted_part() -> None:
    """A flat distribution over 5,000 tokens: the nucleus holds far more than 1,024 of them."""
    scaled = -torch.arange(5000).float().flip(0) * 1e-4
    weights = _weights(scaled[None], [SamplingParams(top_p=0.9)]).flatten()[:5000]
    probabilities = torch.softmax(scaled.double(), 0)
    kept = weights > 0
    assert probabilities[kept].sum() >= 0.9
    assert probabilities[kept].sum() - probabilities[kept].min() < 0.9
    assert kept.nonzero().min() == 5000 - kept.sum()


@pytest.mark.parametrize("other", [{}, {"top_p": 0.9}, {"top_k": 300}, {"min_p": 0.1}])
def test_off_the_cpu_no_filter_waits_for_the_device(
    monkeypatch: pytest.MonkeyPatch, other: dict[str, Any]
) -> None:
    """Device ``meta`` has no values: to read one, or to ask for the indices of those that are not
    0, raises."""

    def to_device(values: list[object], device: torch.device, dtype: Any = None) -> torch.Tensor:
        return torch.from_numpy(np.array(values, dtype)).to(device)

    monkeypatch.setattr(filters, "to_device", to_device)
    scaled = torch.empty(2, 5000, device="meta")
    params = [SamplingParams(top_k=20, top_p=0.7), SamplingParams(**other)]
    assert _weights(scaled, params).shape == (2, 40, 128)


def test_top_k_bounds_the_search_for_a_nucleus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 5,000 equals top_k keeps all, as ties of the fifth. Their nucleus has more than the five
    that are looked at, but to sort the others would not change the bound."""

    def fail(scaled: torch.Tensor) -> torch.Tensor:
        raise AssertionError("all tokens are sorted")

    monkeypatch.setattr(filters, "_descending", fail)
    weights = _weights(torch.zeros(1, 5000), [SamplingParams(top_k=5, top_p=0.9)])
    assert (weights.flatten()[:5000] > 0).all()


def test_ties_with_the_last_kept_are_kept() -> None:
    scaled = torch.tensor([[0.0, -1.0, -1.0, -1.0, -5.0]])
    weights = _weights(scaled, [SamplingParams(top_k=2)]).flatten()[:5]
    assert (weights > 0).tolist() == [True, True, True, True, False]


def test_a_token_of_no_weight_is_never_drawn() -> None:
    logits = torch.full((1, 1500), -math.inf)
    logits[0, 700] = 1.0
    logits[0, 1400] = 1.0
    drawn = {sampled(logits, [(make_row(seed=seed), 0)])[0].token_id for seed in range(200)}
    assert drawn == {700, 1400}


# ------------------------------------------------------------------------------- logprobs


def test_logprobs_are_the_models_own() -> None:
    """Raw log-probabilities, whatever temperature and bias did; chosen first, then the best."""
    logits = logits_of(1, 40)
    raw = torch.log_softmax(logits[0], 0)
    order = raw.argsort(descending=True).tolist()
    worst = order[-1]
    row = make_row(temperature=0, logit_bias={worst: 100.0}, logprobs=3)
    (got,) = sampled(logits, [(row, 0)])
    assert [each.token_id for each in got.logprobs] == [worst, *order[:3]]
    assert [each.rank for each in got.logprobs] == [40, 1, 2, 3]
    for each in got.logprobs:
        assert each.logprob == pytest.approx(raw[each.token_id].item())


@pytest.mark.parametrize("vocab", [40, 3000])
def test_of_equals_the_first_are_the_best(vocab: int) -> None:
    """Whatever other rows ask for: rounded logits have equals by the dozen."""
    logits = logits_of(6, vocab).bfloat16()
    raw = torch.log_softmax(logits.float(), -1)
    right = raw.sort(dim=-1, descending=True, stable=True).indices.tolist()
    for most in (0, 1, 2, 5, 17, 40):
        for index in range(6):
            count = min(index, most)
            rows = [make_row(temperature=0, logprobs=most), make_row(temperature=0, logprobs=count)]
            _, got = sampled(logits[[0, index]], [(row, 0) for row in rows])
            assert [each.token_id for each in got.logprobs] == right[index][: max(count, 1)]
            assert [each.rank for each in got.logprobs[:count]] == list(range(1, count + 1))


def test_prompt_logprobs(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = logits_of(9, 50)
    raw = torch.log_softmax(logits, -1)
    whole = prompt_logprobs(logits, list(range(9)), 2)
    for index, candidates in enumerate(whole):
        assert candidates[0].token_id == index
        assert candidates[0].logprob == pytest.approx(raw[index, index].item())
        assert candidates[0].rank == int((raw[index] >= raw[index, index]).sum())
        best = raw[index].topk(2).indices.tolist()
        assert [each.token_id for each in candidates[1:]] == [t for t in best if t != index]
    monkeypatch.setattr(sampler, "_SLICE_FLOATS", 100)
    assert prompt_logprobs(logits, list(range(9)), 2) == whole
    assert [len(each) for each in prompt_logprobs(logits, [0] * 9, 0)] == [1] * 9
