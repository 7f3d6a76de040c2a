"""Logits to tokens: a pure function of (logits, parameters, seed, position).

Called by the runner once a step. Nothing here depends on the batch around a row: every reduction
runs along the vocabulary of one row, and each draw comes from a counter-based generator. So the
same request gives the same tokens alone, in any batch, and after a preemption or a restart.

A row that is greedy and asks for nothing else costs one argmax. For the others: raw log
probabilities if asked for, edits of the logits (``constraints``), temperature, then ``min_p``,
``top_k`` and ``top_p``, and one draw by inverse cumulative distribution in vocabulary order.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from jitney.errors import InternalError, InvalidArgumentError, JitneyError
from jitney.execution.constraints import constrain, constrains
from jitney.execution.draw import draw
from jitney.request import Logprob, Row

# Floats of one slice of log-probabilities: bounds the extra memory of a long prompt's.
_SLICE_FLOATS = 1 << 24
ALL_FORBIDDEN = (
    "the sampling parameters forbid every token: see allowed_token_ids, bad_words, logit_bias, "
    "min_tokens"
)
NOT_FINITE = "the model's logits are not finite numbers"


Greatest = Callable[[Tensor], tuple[list[int], list[int]]]
"""Logits [S, V] to the first place of each row's greatest one, where a NaN counts as the greatest,
and the rows in which that is not a finite number."""


@dataclass(slots=True)
class Sampled:
    """What one sequence drew. ``token_id`` means nothing if ``error`` is set."""

    token_id: int
    logprobs: list[Logprob] | None = None
    """If ``params.logprobs`` is set: the chosen token, then the best ones, none twice."""
    error: JitneyError | None = None
    """Why nothing can be drawn for this sequence; the others of the batch are not touched."""


def torch_greatest(logits: Tensor) -> tuple[list[int], list[int]]:
    """A :data:`Greatest` for any device and type."""
    best, places = logits.max(dim=-1)
    return places.tolist(), _not_finite(best)


def select_greatest(device: torch.device, dtype: torch.dtype) -> Greatest:
    """The fastest one for logits of ``dtype``, compiled."""
    if device.type == "cpu":
        try:
            from jitney.execution.greatest import CpuGreatest

            return CpuGreatest(dtype)
        except (ImportError, KeyError):  # without Numba, or of another type
            pass
    return torch_greatest


def sample(
    logits: Tensor, pairs: list[tuple[Row, int]], greatest: Greatest = torch_greatest
) -> list[Sampled]:
    """Draw the next token of each pair (row, sequence index).

    ``logits`` [S, V], any float dtype, is parallel to ``pairs`` and is left as it is. The position
    of the new token, which its randomness depends on, is ``row.end``.
    """
    assert logits.shape[0] == len(pairs)
    if not pairs:
        return []
    chosen, not_finite = greatest(logits)
    special = [place for place, (row, _) in enumerate(pairs) if not _plain(row)]
    broken: dict[int, JitneyError] = {place: InternalError(NOT_FINITE) for place in not_finite}
    if special:
        places = torch.tensor(special, device=logits.device)
        rows = [pairs[place][0] for place in special]
        edited = logits[places].float()  # a copy: indexing with a tensor always is
        if any(constrains(row) for row in rows):
            constrain(edited, rows)
            left = edited.amax(dim=-1)
            for place in _not_finite(left):
                broken.setdefault(special[place], InvalidArgumentError(ALL_FORBIDDEN))
        drawn = draw(edited, [pairs[place] for place in special]).tolist()
        for place, token_id in zip(special, drawn, strict=True):
            chosen[place] = token_id
    results = [Sampled(token_id) for token_id in chosen]
    _attach_logprobs(results, logits, [row for row, _ in pairs], broken)
    for place, error in broken.items():
        results[place] = Sampled(-1, error=error)
    return results


def prompt_logprobs(logits: Tensor, targets: list[int], k: int) -> list[list[Logprob]]:
    """Candidates at each of P positions of a prompt: the token that stands there, then the best k.

    ``logits`` [P, V]; ``targets`` are the prompt's tokens that these positions predict.
    """
    assert logits.shape[0] == len(targets)
    return _candidates(logits, targets, [k] * len(targets))


def _plain(row: Row) -> bool:
    """Whether an argmax of the raw logits is this row's answer."""
    return row.params.greedy and not constrains(row)


def _not_finite(best: Tensor) -> list[int]:
    """Places where the row's greatest logit is NaN or infinite."""
    return (~torch.isfinite(best)).nonzero().flatten().tolist()


def _attach_logprobs(
    results: list[Sampled], logits: Tensor, rows: list[Row], broken: dict[int, JitneyError]
) -> None:
    """Fill ``logprobs`` of those that asked: of the model's own distribution, before any edit."""
    places, counts = [], []
    for place, row in enumerate(rows):
        if row.params.logprobs is not None and place not in broken:
            places.append(place)
            counts.append(row.params.logprobs)
    if places:
        chosen = [results[place].token_id for place in places]
        asked = logits if len(places) == len(rows) else logits[places]
        for place, candidates in zip(places, _candidates(asked, chosen, counts), strict=True):
            results[place].logprobs = candidates


def _candidates(logits: Tensor, chosen: list[int], counts: list[int]) -> list[list[Logprob]]:
    """For each row of ``logits`` [R, V]: the chosen token, then the ``count`` best, none twice.

    As vLLM ranks them: the best by their order, a chosen one outside them by the number of tokens
    at least as probable.
    """
    result: list[list[Logprob]] = []
    size = max(1, _SLICE_FLOATS // logits.shape[1])
    for start in range(0, len(chosen), size):
        part = slice(start, start + size)
        result.extend(_candidates_of_slice(logits[part], chosen[part], counts[part]))
    return result


def _candidates_of_slice(
    logits: Tensor, chosen: list[int], counts: list[int]
) -> list[list[Logprob]]:
    ids = torch.tensor(chosen, device=logits.device)
    own, ranks, best, best_ids = measure(logits, ids, max(counts))
    return name_candidates(
        chosen, counts, own.tolist(), ranks.tolist(), best.tolist(), best_ids.tolist()
    )


def measure(logits: Tensor, chosen: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of each row of ``logits`` [R, V]: its chosen token's log-probability [R] and rank [R], then
    the ``width`` best ones' log-probabilities and ids [R, at most ``width``], best first."""
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    own = logprobs.gather(1, chosen.unsqueeze(1))
    ranks = (logprobs >= own).sum(dim=-1)
    best, best_ids = logprobs.topk(min(width, logits.shape[1]), dim=-1)
    return own.squeeze(1), ranks, best, best_ids


def name_candidates(
    chosen: list[int],
    counts: list[int],
    own: list[float],
    ranks: list[int],
    best: list[list[float]],
    best_ids: list[list[int]],
) -> list[list[Logprob]]:
    """What :func:`measure` found, as each row asked for it."""
    result = []
    for place, (token, count) in enumerate(zip(chosen, counts, strict=True)):
        top = [
            Logprob(token_id, value, k + 1)
            for k, (token_id, value) in enumerate(
                zip(best_ids[place][:count], best[place][:count], strict=True)
            )
        ]
        first = next((each for each in top if each.token_id == token), None)
        first = first or Logprob(token, own[place], ranks[place])
        result.append([first, *(each for each in top if each.token_id != token)])
    return result
