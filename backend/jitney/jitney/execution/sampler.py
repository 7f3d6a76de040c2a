"""Logits to tokens: a pure function of (logits, parameters, seed, position).

Every reduction runs along the vocabulary of one row, and chance comes from a counter-based
generator: a request gives the same tokens alone, in any batch, and after a preemption or a restart.

:func:`sample` waits for nothing on the device: the token ids stay there as the next step's input,
and :meth:`Samples.wait` brings them to the host. A row that is greedy and asks for nothing else
costs one argmax. For the others: ``logits_processors``, then ``filters``.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from jitney.batch import Row
from jitney.errors import InternalError, InvalidArgumentError, JitneyError
from jitney.execution.filters import choose_tokens
from jitney.execution.logits_processors import lone_mask, needs_processing, process_logits
from jitney.execution.machine import to_device
from jitney.messages import Logprob

# Floats of one slice of log-probabilities: bounds the extra memory of a long prompt's.
_SLICE_FLOATS = 1 << 24


class _Bits(NamedTuple):
    """A float dtype's bits, read as integers of the same width."""

    signed: torch.dtype
    unsigned: npt.DTypeLike
    minus_infinity: int
    """As an unsigned integer. Only NaN with its sign set is larger."""


_BITS_OF = {
    torch.bfloat16: _Bits(torch.int16, np.uint16, 0xFF80),
    torch.float16: _Bits(torch.int16, np.uint16, 0xFC00),
    torch.float32: _Bits(torch.int32, np.uint32, 0xFF800000),
}


@dataclass(slots=True)
class Sampled:
    """One sequence's next token. ``token_id`` means nothing if ``error`` is set."""

    token_id: int
    logprobs: list[Logprob] | None = None
    """If ``params.logprobs`` is set: the chosen token, then the best ones, none twice."""
    error: JitneyError | None = None
    """Why this sequence gets no token; the others of the batch are not touched."""


def argmax(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Of [S, V]: the first index of each row's largest logit, where a NaN counts as the largest
    (int64 [S]), and whether that is a finite number (bool [S])."""
    if logits.device.type == "cpu" and logits.dtype in _BITS_OF:
        # NumPy compares integers a register at a time, ten times as fast as torch does floats.
        form = _BITS_OF[logits.dtype]
        bits = logits.view(form.signed).numpy()
        # A NaN with its sign set would be taken for a small number.
        if bits.view(form.unsigned).max(initial=0) <= form.minus_infinity:
            found = torch.from_numpy(_argmax_of_bits(bits))
            best = logits.gather(1, found.unsqueeze(1)).squeeze(1)
            return found, torch.isfinite(best)
    best, found = logits.max(dim=-1)
    return found, torch.isfinite(best)


def _argmax_of_bits(bits: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """The argmax of each row [S, V] of floats, given as signed integers of the same bits.

    Positive floats are in the order of these integers; negative ones are in the reverse order, and
    their integers are negative.
    """
    indices = bits.argmax(axis=1)
    all_negative = bits[np.arange(len(bits)), indices] < 0
    if all_negative.any():
        indices[all_negative] = bits[all_negative].argmin(axis=1)
    return indices


def _choose_allowed(
    logits: Tensor, masks: dict[int, bytes], chosen: Tensor, allowed: Tensor
) -> None:
    """Correct ``chosen`` and ``allowed`` [S] for greedy rows of which nothing but a grammar's mask
    changes ``logits`` [S, V]. On a CPU this takes a tenth of the time of masking them.

    ``masks``: by the row's index. ``chosen`` are the rows' argmaxes without a mask.
    """
    best = chosen.tolist()
    ids_of: dict[bytes, npt.NDArray[np.int64]] = {}  # rows of one grammar often have one mask
    candidates: dict[int, npt.NDArray[np.int64]] = {}
    for i, mask in masks.items():
        if _allows(mask, best[i]):
            continue  # the argmax stands
        if mask not in ids_of:
            ids_of[mask] = _allowed_ids(mask, logits.shape[1])
        if len(ids_of[mask]):
            candidates[i] = ids_of[mask]
        else:
            allowed[i] = False
    if not candidates:
        return

    # The argmax among each row's candidates, in one array that repeats a short row's first one.
    longest = max(map(len, candidates.values()))
    padded = np.empty((len(candidates), longest), np.int64)
    for row, ids in zip(padded, candidates.values(), strict=True):
        row[: len(ids)] = ids
        row[len(ids) :] = ids[0]
    rows = torch.tensor(list(candidates))
    token_ids = torch.from_numpy(padded)
    best_column, is_finite = argmax(logits[rows.unsqueeze(1), token_ids])
    allowed[rows] = is_finite
    chosen[rows] = token_ids.gather(1, best_column.unsqueeze(1)).squeeze(1)


def _allows(mask: bytes, token_id: int) -> bool:
    """Whether the token's bit is set: bit 0 of byte 0 is token 0's."""
    byte = mask[token_id // 8]
    return bool(byte >> (token_id % 8) & 1)


def _allowed_ids(mask: bytes, size: int) -> npt.NDArray[np.int64]:
    """The ids below ``size`` that a mask, whole words of 32 bits, allows, ascending."""
    words = np.frombuffer(mask, np.uint32)
    # Most words are 0, and need not be unpacked.
    word_indices = words.nonzero()[0]
    bits = np.unpackbits(words[word_indices].view(np.uint8), bitorder="little").reshape(-1, 32)
    rows, bit_indices = bits.nonzero()
    ids: npt.NDArray[np.int64] = 32 * word_indices[rows] + bit_indices
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
        """``finite`` and ``allowed`` [S]: whether the best logit is finite before and after the
        logits processors. ``counts``: for how many best tokens the sequences with these indices ask
        log-probabilities; ``measured``: what :func:`measure` gave for them."""
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
        for i, is_allowed in enumerate(allowed):
            if not is_allowed:
                results[i] = Sampled(-1, error=_no_token(finite=finite[i]))
        return results


def _no_token(*, finite: bool) -> JitneyError:
    """Why a sequence gets no token; ``finite``: the model's own logits are."""
    if not finite:
        return InternalError("the model's logits are not finite numbers")
    return InvalidArgumentError(
        "the sampling parameters forbid every token: see allowed_token_ids, bad_words, "
        "logit_bias, min_tokens, structured_outputs"
    )


def sample(logits: Tensor, pairs: list[tuple[Row, int]]) -> Samples:
    """Sample the next token of each pair (row, sequence index), of which there is at least one.

    ``logits`` [S, V], any float dtype, is parallel to ``pairs`` and is left as it is. The position
    of the new token, which its randomness depends on, is ``row.end``.
    """
    assert logits.shape[0] == len(pairs)
    rows = [row for row, _ in pairs]

    # Plain greedy rows are done with this.
    chosen, finite = argmax(logits)
    allowed = finite
    special = [i for i, row in enumerate(rows) if not row.params.greedy or needs_processing(row)]

    # Greedy rows with a grammar need no processed logits on a CPU.
    masks: dict[int, bytes] = {}
    if logits.device.type == "cpu":
        masks = _lone_masks(rows, special)
    if masks:
        special = [i for i in special if i not in masks]
        allowed = finite.clone()
        _choose_allowed(logits, masks, chosen, allowed)

    # All others do.
    if special:
        index = to_device(special, logits.device)
        copied = logits[index].float()  # a copy: indexing with a tensor always is
        processed = [rows[i] for i in special]
        if any(needs_processing(row) for row in processed):
            process_logits(copied, processed)
            allowed = allowed.index_put((index,), torch.isfinite(copied.amax(dim=-1)))
        chosen[index] = choose_tokens(copied, [pairs[i] for i in special])

    # Log-probabilities are those of the model's own logits.
    asked = {i: row.params.logprobs for i, row in enumerate(rows)}
    counts = {i: count for i, count in asked.items() if count is not None}
    measured: list[Tensor] = []
    if counts:
        index = to_device(list(counts), logits.device)
        logits_of_asked = logits if len(counts) == len(rows) else logits[index]
        measured = measure(logits_of_asked, chosen[index], max(counts.values()))
    return Samples(chosen, finite, allowed, counts, measured)


def _lone_masks(rows: list[Row], indices: list[int]) -> dict[int, bytes]:
    """By index, the masks of those of these rows that nothing else changes."""
    masks = {}
    for i in indices:
        mask = lone_mask(rows[i])
        if mask is not None:
            masks[i] = mask
    return masks


def prompt_logprobs(logits: Tensor, targets: list[int], k: int) -> list[list[Logprob]]:
    """Candidates at each of P positions of a prompt: the token that stands there, then the best k.

    ``logits`` [P, V]; ``targets`` are the prompt's tokens that these positions predict.
    """
    assert logits.shape[0] == len(targets)
    measured = measure(logits, to_device(targets, logits.device), k)
    return name_candidates(targets, [k] * len(targets), [each.tolist() for each in measured])


def measure(logits: Tensor, chosen: Tensor, width: int) -> list[Tensor]:
    """Log-probabilities of each row of unprocessed ``logits`` [R, V], as four tensors: the chosen
    token's log-probability [R] and its rank [R]; then the log-probabilities and the ids of the best
    tokens [R, at most ``width``], best first."""
    size = max(1, _SLICE_FLOATS // logits.shape[1])
    parts = []
    for part, ids in zip(logits.split(size), chosen.split(size), strict=True):
        logprobs = torch.log_softmax(part.float(), dim=-1)
        own = logprobs.gather(1, ids.unsqueeze(1))
        ranks = (logprobs >= own).sum(dim=-1)
        parts.append((own.squeeze(1), ranks, *_best(logprobs, min(width, logits.shape[1]))))
    return [torch.cat(each) for each in zip(*parts, strict=True)]


def _best(values: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """The ``width`` largest of each row [R, V] and their indices; of equals those with the lowest
    indices. topk alone will not do: which of equals it takes depends on ``width``, and so on what
    other rows of the batch ask for."""
    if values.is_cuda:  # without waiting for the device
        best, ids = values.sort(dim=-1, descending=True, stable=True)
        return best[:, :width], ids[:, :width]
    best, ids = values.topk(width, dim=-1)
    if not width:
        return best, ids

    # All values that are not below their row's smallest of the best: equals of it included, and
    # all of a row with a NaN. They come in the order of rows, then of indices.
    rows, ids = (~(values < best[:, -1:])).nonzero(as_tuple=True)
    found = values[rows, ids]
    # Sort them by row, then by falling value, then by index: the sorts are stable, the last first.
    by_value = found.argsort(descending=True, stable=True)
    order = by_value[rows[by_value].argsort(stable=True)]
    # The first ``width`` of each row.
    counts = rows.bincount(minlength=len(values))
    begins = counts.cumsum(0) - counts
    kept = order[begins.unsqueeze(1) + torch.arange(width)]
    return found[kept], ids[kept]


def name_candidates(
    chosen: list[int], counts: Iterable[int], measured: list[list[Any]]
) -> list[list[Logprob]]:
    """For each row: the chosen token, then the ``count`` best, none twice. ``measured`` are the
    four lists of :func:`measure`.

    Ranks are vLLM's: of the best tokens, their order; of a chosen token that is not among them, the
    number of tokens that are at least as probable.
    """
    result = []
    for token, count, own, rank, best, ids in zip(chosen, counts, *measured, strict=True):
        first = Logprob(token, own, rank)
        others = []
        for order in range(min(count, len(ids))):
            candidate = Logprob(ids[order], best[order], order + 1)
            if candidate.token_id == token:
                first = candidate
            else:
                others.append(candidate)
        result.append([first, *others])
    return result
