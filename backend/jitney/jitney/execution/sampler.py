"""Logits to tokens: a pure function of (logits, parameters, seed, position).

Every reduction runs along the vocabulary of one row, and chance comes from a counter-based
generator: a request gives the same tokens alone, in any batch, and after a preemption or a restart.

:func:`sample` waits for nothing on the device: the token ids stay there as the next step's input,
and :meth:`Samples.wait` brings them to the host. A row that is greedy and asks for nothing else
costs one argmax. For the others: ``logits_processors``, then ``filters``.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from jitney.errors import InternalError, InvalidArgumentError, JitneyError
from jitney.execution.filters import choose_tokens
from jitney.execution.logits_processors import lone_mask, needs_processing, process_logits
from jitney.execution.machine import to_device
from jitney.messages import Logprob, Row

# Floats of one slice of log-probabilities: bounds the extra memory of a long prompt's.
_SLICE_FLOATS = 1 << 24
# Integers of the same width, and the bits of minus infinity.
_BITS = {
    torch.bfloat16: (torch.int16, np.uint16, 0xFF80),
    torch.float16: (torch.int16, np.uint16, 0xFC00),
    torch.float32: (torch.int32, np.uint32, 0xFF800000),
}


@dataclass(slots=True)
class Sampled:
    """One sequence's next token. ``token_id`` means nothing if ``error`` is set."""

    token_id: int
    logprobs: list[Logprob] | None = None
    """If ``params.logprobs`` is set: the chosen token, then the best ones, none twice."""
    error: JitneyError | None = None
    """Why there is none for this sequence; the others of the batch are not touched."""


def argmax(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Of [S, V]: the first index of each row's largest logit, where a NaN counts as the largest
    (int64 [S]), and whether that is a finite number (bool [S])."""
    if logits.device.type == "cpu" and logits.dtype in _BITS:
        # NumPy compares integers a register at a time, ten times as fast as torch does floats.
        # Positive floats are sorted like their bits, negative ones in reverse.
        signed, unsigned, minus_infinity = _BITS[logits.dtype]
        bits = logits.view(signed).numpy()
        if bits.view(unsigned).max(initial=0) <= minus_infinity:  # no NaN with its sign set
            indices = bits.argmax(axis=1)
            negative = bits[np.arange(len(bits)), indices] < 0
            if negative.any():
                indices[negative] = bits[negative].argmin(axis=1)
            found = torch.from_numpy(indices)
            return found, torch.isfinite(logits.gather(1, found[:, None])[:, 0])
    best, found = logits.max(dim=-1)
    return found, torch.isfinite(best)


def _choose_allowed(
    logits: Tensor, masks: dict[int, bytes], chosen: Tensor, allowed: Tensor
) -> None:
    """Correct ``chosen`` and ``allowed`` [S] for greedy rows of which nothing but a grammar's mask
    changes ``logits`` [S, V]. On a CPU this takes a tenth of the time of masking them."""
    best = chosen.tolist()
    ids_of: dict[bytes, npt.NDArray[np.int64]] = {}  # rows of one grammar often have one mask
    found: dict[int, npt.NDArray[np.int64]] = {}
    for i, mask in masks.items():
        if mask[best[i] >> 3] >> (best[i] & 7) & 1:
            continue
        if mask not in ids_of:
            ids_of[mask] = _allowed_ids(mask, logits.shape[1])
        if len(ids_of[mask]):
            found[i] = ids_of[mask]
        else:
            allowed[i] = False
    if not found:
        return
    every = np.empty((len(found), max(map(len, found.values()))), np.int64)
    for row, ids in zip(every, found.values(), strict=True):
        row[: len(ids)], row[len(ids) :] = ids, ids[0]
    index, names = torch.tensor(list(found)), torch.from_numpy(every)
    places, allowed[index] = argmax(logits[index.unsqueeze(1), names])
    chosen[index] = names.gather(1, places.unsqueeze(1)).squeeze(1)


def _allowed_ids(mask: bytes, size: int) -> npt.NDArray[np.int64]:
    """The ids below ``size`` that a mask, whole words of 32 bits, allows, ascending."""
    words = np.frombuffer(mask, np.uint32)
    places = words.nonzero()[0]
    bits = np.unpackbits(words[places].view(np.uint8), bitorder="little").reshape(-1, 32)
    rows, columns = bits.nonzero()
    ids: npt.NDArray[np.int64] = 32 * places[rows] + columns
    return ids[: np.searchsorted(ids, size)]


class Samples:
    """The next tokens of a step's sequences, perhaps still being computed."""

    def __init__(
        self,
        token_ids: Tensor,
        finite: Tensor,
        allowed: Tensor,
        counts: dict[int, int],
        measured: list[Tensor],
    ) -> None:
        """``counts``: index of a sequence that asks for log-probabilities -> how many; ``measured``
        of these: see :func:`measure`."""
        self.token_ids = token_ids
        """int64 [S] on the device: some id of the vocabulary where there is an error."""
        self._counts = counts
        self._host = [
            each.to("cpu", non_blocking=True) for each in (token_ids, finite, allowed, *measured)
        ]
        self._copied: torch.cuda.Event | None = None
        if token_ids.is_cuda:
            self._copied = torch.cuda.Event()
            self._copied.record()

    def wait(self) -> list[Sampled]:
        """The samples, parallel to the pairs of the launch, once the device has them."""
        if self._copied is not None:
            self._copied.synchronize()
        token_ids, finite, allowed, *measured = (each.tolist() for each in self._host)
        results = [Sampled(token_id) for token_id in token_ids]
        if self._counts:
            chosen = [token_ids[i] for i in self._counts]
            candidates = name_candidates(chosen, self._counts.values(), measured)
            for i, each in zip(self._counts, candidates, strict=True):
                results[i].logprobs = each
        for i in (i for i, good in enumerate(allowed) if not good):
            error = (
                InvalidArgumentError(
                    "the sampling parameters forbid every token: see allowed_token_ids, bad_words, "
                    "logit_bias, min_tokens, structured_outputs"
                )
                if finite[i]
                else InternalError("the model's logits are not finite numbers")
            )
            results[i] = Sampled(-1, error=error)
        return results


def sample(logits: Tensor, pairs: list[tuple[Row, int]]) -> Samples:
    """Sample the next token of each pair (row, sequence index), of which there is at least one.

    ``logits`` [S, V], any float dtype, is parallel to ``pairs`` and is left as it is. The position
    of the new token, which its randomness depends on, is ``row.end``.
    """
    assert logits.shape[0] == len(pairs)
    rows = [row for row, _ in pairs]
    chosen, finite = argmax(logits)
    allowed = finite
    special = [i for i, row in enumerate(rows) if not row.params.greedy or needs_processing(row)]
    if logits.device.type == "cpu":
        masks = {i: mask for i in special if (mask := lone_mask(rows[i])) is not None}
        if masks:
            special = [i for i in special if i not in masks]
            allowed = finite.clone()
            _choose_allowed(logits, masks, chosen, allowed)
    if special:
        index = to_device(special, logits.device)
        copied = logits[index].float()  # a copy: indexing with a tensor always is
        processed = [rows[i] for i in special]
        if any(needs_processing(row) for row in processed):
            process_logits(copied, processed)
            allowed = allowed.index_put((index,), torch.isfinite(copied.amax(dim=-1)))
        chosen[index] = choose_tokens(copied, [pairs[i] for i in special])
    asked = {i: row.params.logprobs for i, row in enumerate(rows)}
    counts = {i: count for i, count in asked.items() if count is not None}
    measured: list[Tensor] = []
    if counts:
        index = to_device(list(counts), logits.device)
        some = logits if len(counts) == len(rows) else logits[index]
        measured = measure(some, chosen[index], max(counts.values()))
    return Samples(chosen, finite, allowed, counts, measured)


def prompt_logprobs(logits: Tensor, targets: list[int], k: int) -> list[list[Logprob]]:
    """Candidates at each of P positions of a prompt: the token that stands there, then the best k.

    ``logits`` [P, V]; ``targets`` are the prompt's tokens that these positions predict.
    """
    assert logits.shape[0] == len(targets)
    measured = measure(logits, to_device(targets, logits.device), k)
    return name_candidates(targets, [k] * len(targets), [each.tolist() for each in measured])


def measure(logits: Tensor, chosen: Tensor, width: int) -> list[Tensor]:
    """Of the model's own distribution in each row of ``logits`` [R, V], unprocessed: its chosen
    token's log-probability [R] and rank [R], then the ``width`` best ones' log-probabilities and
    ids [R, at most ``width``], best first."""
    size = max(1, _SLICE_FLOATS // logits.shape[1])
    parts = []
    for part, ids in zip(logits.split(size), chosen.split(size), strict=True):
        logprobs = torch.log_softmax(part.float(), dim=-1)
        own = logprobs.gather(1, ids.unsqueeze(1))
        ranks = (logprobs >= own).sum(dim=-1)
        parts.append((own.squeeze(1), ranks, *_best(logprobs, min(width, logits.shape[1]))))
    return [torch.cat(each) for each in zip(*parts, strict=True)]


def _best(values: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """The ``width`` largest of each row [R, V] and their indices, of equals the first. Which of
    them topk takes depends on ``width``, and so on what else is in the batch."""
    if values.is_cuda:  # without waiting for the device
        best, ids = values.sort(dim=-1, descending=True, stable=True)
        return best[:, :width], ids[:, :width]
    best, ids = values.topk(width, dim=-1)
    if not width:
        return best, ids
    rows, ids = (~(values < best[:, -1:])).nonzero(as_tuple=True)  # all of a row with a NaN
    found = values[rows, ids]
    order = found.argsort(descending=True, stable=True)
    order = order[rows[order].argsort(stable=True)]
    counts = rows.bincount(minlength=len(values))
    places = order[(counts.cumsum(0) - counts).unsqueeze(1) + torch.arange(width)]
    return found[places], ids[places]


def name_candidates(
    chosen: list[int], counts: Iterable[int], measured: list[list[Any]]
) -> list[list[Logprob]]:
    """What :func:`measure` found, as each row asked for it: the chosen token, then the ``count``
    best, none twice.

    As vLLM ranks them: the best by their order, a chosen one outside them by the number of tokens
    at least as probable.
    """
    result = []
    for token, count, own, rank, best, ids in zip(chosen, counts, *measured, strict=True):
        pairs = zip(ids[:count], best[:count], strict=True)
        top = [Logprob(each, value, k) for k, (each, value) in enumerate(pairs, start=1)]
        first = next((each for each in top if each.token_id == token), Logprob(token, own, rank))
        result.append([first, *(each for each in top if each.token_id != token)])
    return result
