"""One token from each row's distribution: temperature, min_p, top_k, top_p and the choice itself.

Called by the sampler. The logits of a row are *scaled*: shifted so that the largest is 0, then
divided by the temperature. A token's *weight* is the exponential of its scaled logit: its
probability, up to a factor.

Every filter is a *lower bound* on scaled logits. ``min_p`` keeps those of at least log(min_p);
``top_k`` those of at least the k-th largest. ``top_p`` keeps the *nucleus*: it takes the tokens
that min_p and top_k keep, the largest first, until their weights add up to this share of the weight
of them all. Tokens that tie with the last one kept are kept, so the order of equals does not
matter.
"""

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from jitney.batch import Row
from jitney.execution.machine import to_device
from jitney.execution.philox import uniforms
from jitney.sampling_params import SamplingParams

_CHUNK = 128
"""Tokens of a chunk of the vocabulary: :func:`_pick` draws a chunk, then a token in it."""
_FIRST_LOOK = 1024
"""On a CPU a nucleus is first looked for among so many of a row's largest logits. Only if it is
larger, all of them are sorted."""

SampledRow = tuple[Row, int]
"""A row as the sampler must see it, and the index of the sequence that gets the token. The index is
one of ``Row.sample``, and not always ``Row.index``: a prompt's row may begin several sequences."""


def choose_tokens(logits: Tensor, pairs: list[SampledRow]) -> Tensor:
    """Token ids [S] (int64) for ``logits`` [S, V] (f32), which are overwritten.

    A greedy row's is the argmax. A row without a finite logit gives an arbitrary id.
    """
    best, chosen = logits.max(dim=-1)
    sampled = [i for i, (row, _) in enumerate(pairs) if not row.params.greedy]
    if not sampled:
        return chosen
    index = to_device(sampled, logits.device)
    if len(sampled) < len(pairs):
        logits = logits[index]
        best = best[index]
    chosen[index] = _sample(logits, best, [pairs[i] for i in sampled])
    return chosen


def _sample(logits: Tensor, best: Tensor, pairs: list[SampledRow]) -> Tensor:
    """Ids [S] drawn from ``logits`` [S, V], which are overwritten; ``best`` [S] are the largest."""
    params = [row.params for row, _ in pairs]
    temperature = to_device([each.temperature for each in params], logits.device, np.float32)
    # Shifting first keeps a small temperature from overflowing: the largest logit stays 0.
    logits -= best.unsqueeze(1)
    logits /= temperature.unsqueeze(1)
    weights = _weights(logits, params)
    ids = _pick(weights, _uniforms(pairs, logits.device))
    return ids.clamp_(max=logits.shape[1] - 1)  # a guard: no id may be in the padding


def _uniforms(pairs: list[SampledRow], device: torch.device) -> Tensor:
    """[S, 2] f64 in [0, 1), keyed by (seed, sequence index, position of the new token)."""
    seeds = [row.params.seed for row, _ in pairs if row.params.seed is not None]
    assert len(seeds) == len(pairs), "a request gets its seed at submission"
    indices = [index for _, index in pairs]
    positions = [row.end for row, _ in pairs]
    return to_device(uniforms(seeds, indices, positions), device)


# ------------------------------------------------------------------ the filters


def _weights(scaled: Tensor, params: list[SamplingParams]) -> Tensor:
    """The weight of each token of ``scaled`` [S, V]; 0 if a filter drops it. Returns
    [S, chunks, _CHUNK]: the vocabulary in chunks, of which the last one is padded with zeros."""
    rows, vocab = scaled.shape
    chunks = math.ceil(vocab / _CHUNK)
    weights = scaled.new_empty((rows, chunks * _CHUNK))
    weights[:, vocab:] = 0.0
    torch.exp(scaled, out=weights[:, :vocab])
    if any(_is_filtered(each) for each in params):
        _drop_below(weights, scaled, _lower_bound(scaled, weights, params))
    return weights.view(rows, chunks, _CHUNK)


def _is_filtered(params: SamplingParams) -> bool:
    return params.top_p < 1.0 or params.top_k > 0 or params.min_p > 0.0


def _drop_below(weights: Tensor, scaled: Tensor, bound: Tensor) -> None:
    """Set to 0, in place, the weights [S, ≥ V] of the logits [S, V] that are below their row's
    bound [S]."""
    # masked_fill_ would take four times as long.
    weights[:, : scaled.shape[1]].mul_(scaled >= bound.unsqueeze(1))


def _lower_bound(scaled: Tensor, weights: Tensor, params: list[SamplingParams]) -> Tensor:
    """The least scaled logit that each row keeps: [S] f32. ``scaled`` is [S, V], and ``weights``
    [S, ≥ V] are its weights, padded with zeros.

    min_p needs no order of the logits. For top_k and top_p, the largest logits of each row are
    taken in order: as few as are enough for every row, or all.
    """
    device = scaled.device
    vocab = scaled.shape[1]
    log_min_p = [math.log(each.min_p) if each.min_p > 0.0 else -math.inf for each in params]
    bound = to_device(log_min_p, device, np.float32)

    top_p = [each.top_p for each in params]
    # 0 where top_k filters nothing: it is off, or keeps the whole vocabulary.
    top_k = [each.top_k if 0 < each.top_k < vocab else 0 for each in params]
    num_largest = _count_largest(top_k, top_p, vocab, on_cpu=device.type == "cpu")
    if num_largest == 0:  # neither top_k nor top_p filters
        return bound
    if num_largest == vocab:
        largest = _descending(scaled)
    else:
        largest = scaled.topk(num_largest, dim=-1).values

    k = to_device(top_k, device)
    kth_largest = largest.gather(1, (k - 1).clamp(min=0).unsqueeze(1)).squeeze(1)
    bound = torch.where(k > 0, torch.maximum(bound, kth_largest), bound)
    if all(p >= 1.0 for p in top_p):
        return bound
    return _raise_to_nucleus(
        bound,
        scaled=scaled,
        weights=weights,
        largest=largest,
        top_k=k,
        top_p=to_device(top_p, device, np.float64),
    )


def _count_largest(top_k: list[int], top_p: list[float], vocab: int, *, on_cpu: bool) -> int:
    """How many of each row's largest logits are needed, at first, to apply top_k and top_p: the
    same number for every row; 0 if no row has either."""
    count = max(top_k)
    # With top_k the nucleus lies within the k largest. Without, it may have any size.
    if any(p < 1.0 and k == 0 for k, p in zip(top_k, top_p, strict=True)):
        # On a GPU all are sorted: to learn whether fewer are enough, the host would have to wait.
        count = max(count, _FIRST_LOOK if on_cpu else vocab)
    return min(count, vocab)


def _descending(scaled: Tensor) -> Tensor:
    """Rows [S, V] sorted whole. On a CPU by NumPy, whose vectorized sort is ten times as fast."""
    if scaled.device.type == "cpu":
        return torch.from_numpy(np.sort(scaled.numpy(), axis=-1)[:, ::-1].copy())
    return scaled.sort(dim=-1, descending=True).values


def _raise_to_nucleus(
    bound: Tensor,
    scaled: Tensor,
    weights: Tensor,
    largest: Tensor,
    top_k: Tensor,
    top_p: Tensor,
) -> Tensor:
    """``bound`` [S], raised to the smallest logit of the nucleus in rows whose ``top_p`` [S] f64 is
    below 1. ``largest`` [S, K] are the K largest logits of each row, descending. ``top_k`` [S]
    int64 is 0 in rows where it filters nothing, and at most K in the others."""
    kept = weights.clone()
    _drop_below(kept, scaled, bound)
    # As in ``_pick``: the sum of a chunk in f32, the sum of the chunks in f64.
    kept_weight = kept.unflatten(1, (-1, _CHUNK)).sum(dim=-1).sum(dim=-1, dtype=torch.float64)
    needed = top_p * kept_weight
    nucleus = _find_nucleus(largest, bound, needed)
    least = nucleus.least
    # On a GPU there is no second look, for which the host would have to wait. No row needs one: if
    # any row has top_p without top_k, the K are the whole vocabulary.
    if scaled.device.type == "cpu" and largest.shape[1] < scaled.shape[1]:
        # A nucleus may have more tokens than the K. Look again among all tokens of these rows. With
        # top_k there is no need: nothing below the k-th largest logit is kept, and that is among
        # the K.
        rows = (~nucleus.is_complete & (top_p < 1.0) & (top_k == 0)).nonzero().squeeze(1)
        if len(rows):
            all_sorted = _descending(scaled[rows])
            least[rows] = _find_nucleus(all_sorted, bound[rows], needed[rows]).least
    return torch.where(top_p < 1.0, torch.maximum(bound, least), bound)


class _Nucleus(NamedTuple):
    """What ``top_p`` keeps of each row."""

    least: Tensor
    """[S] f32: the smallest logit in it."""
    is_complete: Tensor
    """bool [S]: whether the logits that were looked at have all of it."""


def _find_nucleus(largest: Tensor, bound: Tensor, needed: Tensor) -> _Nucleus:
    """The fewest of the largest logits whose weights together are at least ``needed`` [S] f64.

    ``largest`` is [S, K], descending. Logits below ``bound`` [S] have no weight. A token belongs to
    the nucleus if those before it have less than the needed weight.
    """
    weights = largest.exp().masked_fill_(largest < bound.unsqueeze(1), 0.0)
    with_token = weights.cumsum(dim=-1, dtype=torch.float64)
    before_token = with_token - weights
    size = (before_token < needed.unsqueeze(1)).sum(dim=-1)
    last = (size - 1).clamp_(min=0)
    least = largest.gather(1, last.unsqueeze(1)).squeeze(1)
    return _Nucleus(least, is_complete=with_token[:, -1] >= needed)


# ------------------------------------------------------------------ the choice


def _pick(weights: Tensor, numbers: Tensor) -> Tensor:
    """Draw from the weights [S, chunks, _CHUNK]: ids [S], none of weight 0. Each row has two
    numbers in [0, 1): ``numbers`` [S, 2] f64.

    The first number draws a chunk, whose weight is the sum of its tokens'. The second one draws a
    token in that chunk. What is drawn is the first whose cumulative weight exceeds number × total.

    Two draws, because weights may differ in their last bits from one time to the next: a resumption
    computes in one prefill what decodes had computed. All cumulative weights then move a little,
    and if any moves past the number that it is compared with, another token is drawn. Each
    comparison has its own small chance of that, so fewer comparisons keep the token more often. A
    single draw would compare its number with a cumulative weight of every token. Two draws compare
    theirs with far fewer: one for each chunk, and one for each token of the chunk that was drawn.
    """
    sums = weights.sum(dim=-1).cumsum(dim=-1, dtype=torch.float64)
    chunk = _first_above(sums, numbers[:, 0] * sums[:, -1])
    all_rows = torch.arange(len(weights), device=weights.device)
    inside = weights[all_rows, chunk].cumsum(dim=-1, dtype=torch.float64)
    return chunk * _CHUNK + _first_above(inside, numbers[:, 1] * inside[:, -1])


def _first_above(cumulative: Tensor, target: Tensor) -> Tensor:
    """The first index of each row where ``cumulative`` [S, N] exceeds ``target`` [S].

    Rounding can make the target equal to the total, which nothing exceeds. Then it is the last
    index that has a weight.
    """
    # ``cumulative`` never falls. So the number of values that are too small is the index of the
    # first value that is not.
    first_above = (cumulative <= target.unsqueeze(1)).sum(dim=-1)
    # The first value that reaches the total belongs to the last weight: all behind it are 0.
    total = cumulative[:, -1:]
    last_with_weight = (cumulative < total).sum(dim=-1)
    return torch.minimum(first_above, last_with_weight)
