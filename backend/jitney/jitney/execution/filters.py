"""One token from each row's distribution: temperature, min_p, top_k, top_p and the choice itself.

Called by the sampler. The logits of a row are *scaled*: shifted so that the largest is 0, then
divided by the temperature. Every filter is a *lower bound* on scaled logits. ``min_p`` keeps those
of at least log(min_p); ``top_k`` those of at least the k-th largest. ``top_p`` keeps the *nucleus*:
the fewest of the largest that together hold that share of what the first two left. Tokens that tie
with the last one kept are kept, so the order of equals does not matter.
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

# Tokens per partial sum: 64-bit cumulative sums find the chunk, then the token in it.
_CHUNK = 128
# On a CPU a nucleus is first looked for among so many of a row's largest logits. Only if it is
# wider, all of them are sorted.
_CANDIDATES = 1024


def choose_tokens(logits: Tensor, pairs: list[tuple[Row, int]]) -> Tensor:
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


def _sample(logits: Tensor, best: Tensor, pairs: list[tuple[Row, int]]) -> Tensor:
    """Ids [S] drawn from ``logits`` [S, V], which are overwritten; ``best`` [S] are the largest."""
    params = [row.params for row, _ in pairs]
    temperature = to_device([each.temperature for each in params], logits.device, np.float32)
    # Shifting first keeps a small temperature from overflowing: the largest logit stays 0.
    logits -= best.unsqueeze(1)
    logits /= temperature.unsqueeze(1)
    weights = _weights(logits, params)
    ids = _pick(weights, _uniforms(pairs, logits.device))
    return ids.clamp_(max=logits.shape[1] - 1)  # a row of NaN may give an index in the padding


def _uniforms(pairs: list[tuple[Row, int]], device: torch.device) -> Tensor:
    """[S, 2] f64 in [0, 1), keyed by (seed, sequence index, position of the new token)."""
    seeds = [row.params.seed for row, _ in pairs if row.params.seed is not None]
    assert len(seeds) == len(pairs), "a request gets its seed at submission"
    numbers = uniforms(seeds, [index for _, index in pairs], [row.end for row, _ in pairs])
    return to_device(numbers, device)


def _weights(scaled: Tensor, params: list[SamplingParams]) -> Tensor:
    """Probabilities up to a factor, 0 for what the filters drop: [S, C, _CHUNK], zero-padded.

    ``scaled`` [S, V]: the largest of each row is 0.
    """
    rows, vocab = scaled.shape
    chunks = -(-vocab // _CHUNK)
    weights = scaled.new_empty((rows, chunks * _CHUNK))
    weights[:, vocab:] = 0.0
    torch.exp(scaled, out=weights[:, :vocab])
    parts = weights.view(rows, chunks, _CHUNK)
    if any(each.top_p < 1.0 or each.top_k > 0 or each.min_p > 0.0 for each in params):
        _drop_below(weights, scaled, _lower_bound(scaled, parts, params))
    return parts


def _drop_below(weights: Tensor, scaled: Tensor, bound: Tensor) -> None:
    """Set to 0 the weights [R, ≥ V] of logits [R, V] below their row's bound. Multiplying by a mask
    is four times as fast as filling by it."""
    weights[:, : scaled.shape[1]].mul_(scaled >= bound.unsqueeze(1))


def _lower_bound(scaled: Tensor, parts: Tensor, params: list[SamplingParams]) -> Tensor:
    """Least logit that each row keeps: [R] f32. ``scaled`` [R, V], ``parts`` its weights."""
    device = scaled.device
    vocab = scaled.shape[1]
    log_min_p = [math.log(each.min_p) if each.min_p > 0.0 else -math.inf for each in params]
    bound = to_device(log_min_p, device, np.float32)
    # 0 stands for off. So does a top_k of the whole vocabulary or more.
    top_k = [each.top_k if 0 < each.top_k < vocab else 0 for each in params]
    top_p = [each.top_p for each in params]
    # Rows whose nucleus may have any size. With top_k it lies within the k largest.
    of_any_size = [i for i, k in enumerate(top_k) if top_p[i] < 1.0 and not k]

    # How many of each row's largest logits are sorted: as many for every row.
    width = max(top_k)
    if of_any_size:
        # On a GPU all of them: to learn whether fewer are enough, the host would have to wait.
        width = max(width, _CANDIDATES if device.type == "cpu" else vocab)
    width = min(width, vocab)
    if not width:
        return bound
    largest = _descending(scaled) if width == vocab else scaled.topk(width, dim=-1).values

    k = to_device(top_k, device)
    kth_largest = largest.gather(1, (k - 1).clamp(min=0).unsqueeze(1)).squeeze(1)
    bound = torch.where(k > 0, torch.maximum(bound, kth_largest), bound)
    if all(p >= 1.0 for p in top_p):
        return bound

    kept = parts.clone()
    _drop_below(kept.flatten(1), scaled, bound)
    kept_weight = kept.sum(dim=-1).sum(dim=-1, dtype=torch.float64)  # of what min_p and top_k left
    top_p_of_row = to_device(top_p, device, np.float64)
    share = top_p_of_row * kept_weight
    nucleus = _find_nucleus(largest, bound, share)
    least = nucleus.least
    if of_any_size and width < vocab:
        index = to_device(of_any_size, device)
        wider = index[~nucleus.is_whole[index]]
        if wider.numel():
            all_sorted = _descending(scaled[wider])
            least[wider] = _find_nucleus(all_sorted, bound[wider], share[wider]).least
    return torch.where(top_p_of_row < 1.0, torch.maximum(bound, least), bound)


def _descending(scaled: Tensor) -> Tensor:
    """Rows [R, V] sorted whole. On a CPU by numpy, whose vectorized sort is ten times as fast."""
    if scaled.device.type == "cpu":
        return torch.from_numpy(np.sort(scaled.numpy(), axis=-1)[:, ::-1].copy())
    return scaled.sort(dim=-1, descending=True).values


class _Nucleus(NamedTuple):
    """What ``top_p`` keeps of each row."""

    least: Tensor
    """[R] f32: the smallest logit in it."""
    is_whole: Tensor
    """bool [R]: whether all of it is among the logits that were looked at."""


def _find_nucleus(largest: Tensor, bound: Tensor, share: Tensor) -> _Nucleus:
    """The fewest of the largest that weigh at least ``share`` [R] f64.

    ``largest`` [R, K], descending; those below ``bound`` [R] weigh nothing. A token belongs to the
    nucleus if those before it weigh less than the share.
    """
    weights = largest.exp().masked_fill_(largest < bound.unsqueeze(1), 0.0)
    reached = weights.cumsum(dim=-1, dtype=torch.float64)
    before = reached - weights
    size = (before < share.unsqueeze(1)).sum(dim=-1)
    last = (size - 1).clamp_(min=0)
    return _Nucleus(
        least=largest.gather(1, last.unsqueeze(1)).squeeze(1), is_whole=reached[:, -1] >= share
    )


def _pick(parts: Tensor, numbers: Tensor) -> Tensor:
    """Draw from the weights ``parts`` [S, C, _CHUNK]: ids [S], none of weight 0.

    First a chunk is drawn by the chunks' sums, then a token in it, each by a number of its own
    (``numbers`` [S, 2] f64 in [0, 1)): the first whose cumulative weight exceeds number × total.

    Two draws and not one over the vocabulary, so that tokens stay the same where weights differ in
    their last bits, as after a resumption that computes as a prompt what decodes had computed. A
    token changes if its number lies between the old and the new place of a border. One draw would
    have a border for every token of the vocabulary; these have those of the chunks, and those
    inside one chunk.
    """
    sums = parts.sum(dim=-1).cumsum(dim=-1, dtype=torch.float64)
    chunk = _first_above(sums, numbers[:, 0] * sums[:, -1])
    every_row = torch.arange(parts.shape[0], device=parts.device)
    inside = parts[every_row, chunk].cumsum(dim=-1, dtype=torch.float64)
    return chunk * _CHUNK + _first_above(inside, numbers[:, 1] * inside[:, -1])


def _first_above(cumulative: Tensor, target: Tensor) -> Tensor:
    """First index where ``cumulative`` [S, N] exceeds ``target`` [S]. Rounding can put the target
    at the total, which nothing exceeds: then the last index whose own weight is not 0."""
    first = (cumulative <= target.unsqueeze(1)).sum(dim=-1)
    last = (cumulative < cumulative[:, -1:]).sum(dim=-1)
    return torch.minimum(first, last)
