"""Logits to tokens: a pure function of (logits, parameters, seed, position).

Every reduction runs along the vocabulary of one row, and chance comes from a counter-based
generator: a request gives the same tokens alone, in any batch, and after a preemption or a restart.

:func:`sample` waits for nothing on the device: the token ids stay there as the next step's input,
and :meth:`PendingSamples.wait` brings them to the host. A row that is greedy and asks for nothing
else costs one argmax. For the others: ``logits_processors``, then ``filters``.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from jitney.batch import Row
from jitney.errors import InternalError, InvalidArgumentError, JitneyError
from jitney.execution.filters import SampledRow, choose_tokens
from jitney.execution.logits_processors import needs_processing, process_logits, sole_mask
from jitney.execution.machine import to_device
from jitney.messages import Logprob

_SLICE_FLOATS = 1 << 24
"""Floats of one slice of log-probabilities: bounds the extra memory of a long prompt's."""


@dataclass(slots=True)
class SampledToken:
    """One sequence's next token. ``token_id`` means nothing if ``error`` is set."""

    token_id: int
    logprobs: list[Logprob] | None = None
    """If ``params.logprobs`` is set: the chosen token, then the best ones, none twice."""
    error: JitneyError | None = None
    """Why this sequence gets no token; the others of the batch are not touched."""


class PendingSamples:
    """The next tokens of a step's sequences, perhaps still being computed."""

    def __init__(
        self,
        token_ids: Tensor,
        model_is_finite: Tensor,
        has_choice: Tensor,
        asked: dict[int, int],
        logprobs: "TokenLogprobs | None",
    ) -> None:
        """``model_is_finite``, bool [S]: whether the model's largest logit is a finite number.
        ``has_choice``, bool [S]: whether a token is left to choose, which means that the largest
        logit after the processors is a finite number.

        ``asked``: by index, the sequences that ask for log-probabilities, and for how many of the
        best tokens. ``logprobs`` are those of these sequences, in this order; None if none asks."""
        self.token_ids = token_ids
        """int64 [S] on the device: some id of the vocabulary where there is an error."""
        self._asked = asked
        # Copies on the host: on a GPU they are valid only after ``_copied``.
        self._token_ids = _copy_to_host(token_ids)
        self._model_is_finite = _copy_to_host(model_is_finite)
        self._has_choice = _copy_to_host(has_choice)
        self._logprobs: TokenLogprobs | None = None
        if logprobs is not None:
            self._logprobs = TokenLogprobs(*(_copy_to_host(each) for each in logprobs))
        self._copied: torch.cuda.Event | None = None
        if token_ids.is_cuda:
            self._copied = torch.cuda.Event()
            self._copied.record()

    def wait(self) -> list[SampledToken]:
        """The samples, parallel to the pairs of :func:`sample`, once the device has them."""
        if self._copied is not None:
            self._copied.synchronize()
        token_ids: list[int] = self._token_ids.tolist()
        results = [SampledToken(token_id) for token_id in token_ids]
        if self._logprobs is not None:
            chosen = [token_ids[i] for i in self._asked]
            candidates = list_candidates(chosen, list(self._asked.values()), self._logprobs)
            for i, of_sequence in zip(self._asked, candidates, strict=True):
                results[i].logprobs = of_sequence
        for i, has_choice in enumerate(self._has_choice.tolist()):
            if not has_choice:
                error = _no_token(model_is_finite=bool(self._model_is_finite[i]))
                results[i] = SampledToken(-1, error=error)
        return results


def _copy_to_host(tensor: Tensor) -> Tensor:
    """From a GPU without waiting for the copy."""
    return tensor.to("cpu", non_blocking=True)


def _no_token(*, model_is_finite: bool) -> JitneyError:
    """Why a sequence gets no token: because of the model's own logits, or of the processors."""
    if not model_is_finite:
        return InternalError("the model's logits are not finite numbers")
    return InvalidArgumentError(
        "the sampling parameters forbid every token: see allowed_token_ids, bad_words, "
        "logit_bias, min_tokens, structured_outputs"
    )


def sample(logits: Tensor, pairs: list[SampledRow]) -> PendingSamples:
    """Sample the next token of each of these pairs, of which there is at least one.

    ``logits`` [S, V], any float dtype, is parallel to ``pairs`` and is left as it is. The position
    of the new token, which its randomness depends on, is ``row.end``.
    """
    assert logits.shape[0] == len(pairs)
    rows = [row for row, _ in pairs]

    # A greedy row that asks for nothing else is done with the argmax.
    chosen, model_is_finite = argmax(logits)
    remaining = [i for i, row in enumerate(rows) if not row.params.greedy or needs_processing(row)]
    has_choice = model_is_finite
    if remaining:
        has_choice = model_is_finite.clone()  # changed below for the remaining rows

    # In some greedy rows nothing but a grammar's mask changes the logits. On a CPU their tokens are
    # chosen among the allowed ones, without masking logits.
    if remaining and logits.device.type == "cpu":
        masks = _sole_masks(rows, remaining)
        if masks:
            _choose_allowed(logits, masks, chosen, has_choice)
            remaining = [i for i in remaining if i not in masks]

    # All others need logits of their own, in float32, which processors and filters change.
    if remaining:
        index = to_device(remaining, logits.device)
        own_logits = logits[index].float()  # a copy: indexing with a tensor always is
        own_rows = [rows[i] for i in remaining]
        if any(needs_processing(row) for row in own_rows):
            process_logits(own_logits, own_rows)
            has_choice[index] = torch.isfinite(own_logits.amax(dim=-1))
        chosen[index] = choose_tokens(own_logits, [pairs[i] for i in remaining])

    # Log-probabilities are those of the model's logits, without processors and filters.
    asked: dict[int, int] = {}
    for i, row in enumerate(rows):
        if row.params.logprobs is not None:
            asked[i] = row.params.logprobs
    logprobs = None
    if asked:
        index = to_device(list(asked), logits.device)
        logits_of_asked = logits if len(asked) == len(rows) else logits[index]
        logprobs = compute_logprobs(logits_of_asked, chosen[index], max(asked.values()))
    return PendingSamples(
        token_ids=chosen,
        model_is_finite=model_is_finite,
        has_choice=has_choice,
        asked=asked,
        logprobs=logprobs,
    )


# ------------------------------------------------------------------ the argmax


class _FloatBits(NamedTuple):
    """How the bits of a float dtype can be read as integers."""

    signed: torch.dtype
    unsigned: npt.DTypeLike
    minus_infinity: int
    """As an unsigned integer. Only a NaN with its sign set is larger."""


_BITS_OF = {
    torch.bfloat16: _FloatBits(torch.int16, np.uint16, 0xFF80),
    torch.float16: _FloatBits(torch.int16, np.uint16, 0xFC00),
    torch.float32: _FloatBits(torch.int32, np.uint32, 0xFF800000),
}


def argmax(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The index of each row's largest logit, int64 [S], and whether that logit is a finite number,
    bool [S]. ``logits`` is [S, V]. A NaN counts as the largest. Of equals it is the first, except
    that on a CPU 0.0 counts as larger than -0.0."""
    indices = None
    if logits.device.type == "cpu" and logits.dtype in _BITS_OF:
        indices = _argmax_on_cpu(logits, _BITS_OF[logits.dtype])
    if indices is None:
        best, indices = logits.max(dim=-1)
    else:
        best = logits.gather(1, indices.unsqueeze(1)).squeeze(1)
    return indices, torch.isfinite(best)


def _argmax_on_cpu(logits: Tensor, form: _FloatBits) -> Tensor | None:
    """The argmax of each row by NumPy, as integers: it compares a register of these at a time, ten
    times as fast as torch compares floats.

    The integers of positive floats are in the order of the floats. Those of negative floats are
    negative and in the reverse order. So the largest integer is the argmax, unless all are
    negative; then the smallest one is.

    None if a NaN has its sign set. The integers of bfloat16, in ascending order:

    - -32768 to -128: from -0.0 down to -inf
    - -127 to -1: the NaN whose sign is set
    - from 0 on: from 0.0 up to inf, then the other NaN

    A NaN counts as the largest float, but neither rule would find one whose sign is set: the
    integers of positive floats are larger, and those of negative floats are smaller.
    """
    signed = logits.view(form.signed).numpy()
    if signed.view(form.unsigned).max(initial=0) > form.minus_infinity:
        return None
    indices: npt.NDArray[np.int64] = signed.argmax(axis=1)
    all_negative = signed[np.arange(len(signed)), indices] < 0
    if all_negative.any():
        indices[all_negative] = signed[all_negative].argmin(axis=1)
    return torch.from_numpy(indices)


# ------------------------------------------------------------------ greedy rows with a grammar


def _sole_masks(rows: list[Row], indices: list[int]) -> dict[int, bytes]:
    """By index, the :func:`sole_mask` of those of these rows that have one."""
    masks = {}
    for i in indices:
        mask = sole_mask(rows[i])
        if mask is not None:
            masks[i] = mask
    return masks


def _choose_allowed(
    logits: Tensor, masks: dict[int, bytes], chosen: Tensor, has_choice: Tensor
) -> None:
    """Choose anew for greedy rows with a grammar's mask: set ``chosen`` and ``has_choice`` [S] of
    the rows in ``masks``. ``chosen`` are the argmaxes of ``logits`` [S, V] without masks.

    It looks at the logits of allowed tokens only, which takes a tenth of the time of masking.
    """
    best = chosen.tolist()
    ids_of: dict[bytes, npt.NDArray[np.int64]] = {}  # rows of one grammar often have one mask
    candidates: dict[int, npt.NDArray[np.int64]] = {}
    for i, mask in masks.items():
        if _is_set(mask, best[i]):
            continue  # the argmax is allowed, and stands
        if mask not in ids_of:
            ids_of[mask] = _allowed_ids(mask, logits.shape[1])
        if len(ids_of[mask]):
            candidates[i] = ids_of[mask]
        else:
            has_choice[i] = False
    if not candidates:
        return

    rows = torch.tensor(list(candidates))
    token_ids = torch.from_numpy(_pad(list(candidates.values())))
    best_column, is_finite = argmax(logits[rows.unsqueeze(1), token_ids])
    chosen[rows] = token_ids.gather(1, best_column.unsqueeze(1)).squeeze(1)
    has_choice[rows] = is_finite


def _pad(lists: list[npt.NDArray[np.int64]]) -> npt.NDArray[np.int64]:
    """Lists of ids as one array [lists, longest]. The first id of a shorter list fills its row: an
    argmax over the row is that over the list."""
    longest = max(map(len, lists))
    padded = np.empty((len(lists), longest), np.int64)
    for row, ids in zip(padded, lists, strict=True):
        row[: len(ids)] = ids
        row[len(ids) :] = ids[0]
    return padded


def _is_set(mask: bytes, token_id: int) -> bool:
    """Whether the mask allows the token: bit 0 of byte 0 is token 0's."""
    byte = mask[token_id // 8]
    bit = 1 << (token_id % 8)
    return bool(byte & bit)


def _allowed_ids(mask: bytes, size: int) -> npt.NDArray[np.int64]:
    """The ids below ``size`` that a mask allows, ascending."""
    # A mask has whole words of 32 bits. Most are 0, and need not be unpacked.
    words = np.frombuffer(mask, np.uint32)
    word_indices = words.nonzero()[0]
    bits = np.unpackbits(words[word_indices].view(np.uint8), bitorder="little").reshape(-1, 32)
    rows, bit_indices = bits.nonzero()
    ids: npt.NDArray[np.int64] = 32 * word_indices[rows] + bit_indices
    return ids[: np.searchsorted(ids, size)]


# ------------------------------------------------------------------ log-probabilities


class TokenLogprobs(NamedTuple):
    """Log-probabilities of R rows of logits: of one given token of each, and of the W best."""

    given: Tensor
    """[R]: the given token's."""
    ranks: Tensor
    """int64 [R]: how many tokens are at least as probable as the given one."""
    best: Tensor
    """[R, W]: those of the W best tokens, best first."""
    best_ids: Tensor
    """int64 [R, W]: the ids of these tokens."""


def prompt_logprobs(logits: Tensor, targets: list[int], k: int) -> list[list[Logprob]]:
    """Candidates at each of P positions of a prompt: the token that stands there, then the best k.

    ``logits`` [P, V]; ``targets`` are the prompt's tokens that these positions predict.
    """
    assert logits.shape[0] == len(targets)
    logprobs = compute_logprobs(logits, to_device(targets, logits.device), k)
    return list_candidates(targets, [k] * len(targets), logprobs)


def compute_logprobs(logits: Tensor, given_ids: Tensor, width: int) -> TokenLogprobs:
    """Log-probabilities of the given tokens [R] and of the ``width`` best ones, or of all if there
    are fewer. ``logits`` [R, V] are the model's."""
    width = min(width, logits.shape[1])
    slice_len = max(1, _SLICE_FLOATS // logits.shape[1])
    slices: list[TokenLogprobs] = []
    for part, ids in zip(logits.split(slice_len), given_ids.split(slice_len), strict=True):
        logprobs = torch.log_softmax(part.float(), dim=-1)
        given = logprobs.gather(1, ids.unsqueeze(1))
        best, best_ids = _best(logprobs, width)
        slices.append(
            TokenLogprobs(
                given=given.squeeze(1),
                ranks=(logprobs >= given).sum(dim=-1),
                best=best,
                best_ids=best_ids,
            )
        )
    return TokenLogprobs(
        given=torch.cat([each.given for each in slices]),
        ranks=torch.cat([each.ranks for each in slices]),
        best=torch.cat([each.best for each in slices]),
        best_ids=torch.cat([each.best_ids for each in slices]),
    )


def _best(values: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """The ``width`` largest of each row [R, V] and their indices, largest first; of equals those
    with the lowest indices.

    topk alone will not do. Which of equals it takes depends on ``width``, and so on what other rows
    of the batch ask for.
    """
    if values.is_cuda:  # without waiting for the device
        best, ids = values.sort(dim=-1, descending=True, stable=True)
        return best[:, :width], ids[:, :width]
    best, ids = values.topk(width, dim=-1)
    if width == 0:
        return best, ids

    # Candidates: the ``width`` best of each row, and all others that equal the smallest of these.
    # (A row with a NaN is taken whole: log_softmax made all of it NaN, and no comparison with a NaN
    # holds.)
    is_candidate = ~(values < best[:, -1:])
    rows, ids = is_candidate.nonzero(as_tuple=True)  # by row, then by index
    found = values[rows, ids]
    # ``order`` is a permutation of the candidates: by row, then by descending value, then by index.
    # They are in order of the index now. So sort by value first, and then by row: a stable sort
    # leaves equals in the order they had.
    by_value = found.argsort(descending=True, stable=True)
    rows_by_value = rows[by_value]
    by_row = rows_by_value.argsort(stable=True)  # indices into ``by_value``
    order = by_value[by_row]
    # The first ``width`` of each row. With rows of 3 and 2 candidates, which begin at 0 and 3, and
    # with width 2, these are [[0, 1], [3, 4]] of ``order``.
    row_sizes = rows.bincount(minlength=len(values))
    row_begins = row_sizes.cumsum(0) - row_sizes
    kept = order[row_begins.unsqueeze(1) + torch.arange(width)]
    return found[kept], ids[kept]


def list_candidates(
    given_ids: list[int], counts: list[int], logprobs: TokenLogprobs
) -> list[list[Logprob]]:
    """For each row: the given token, then as many of the best ones as its count says, none twice.

    Ranks are vLLM's: of the best tokens, their order; of a given token that is not among them, the
    number of tokens that are at least as probable.
    """
    given: list[float] = logprobs.given.tolist()
    ranks: list[int] = logprobs.ranks.tolist()
    best: list[list[float]] = logprobs.best.tolist()
    best_ids: list[list[int]] = logprobs.best_ids.tolist()
    candidates_of_rows = []
    for r, given_id in enumerate(given_ids):
        first = Logprob(given_id, given[r], ranks[r])
        others = []
        for i in range(min(counts[r], len(best_ids[r]))):
            candidate = Logprob(best_ids[r][i], best[r][i], rank=i + 1)
            if candidate.token_id == given_id:
                first = candidate
            else:
                others.append(candidate)
        candidates_of_rows.append([first, *others])
    return candidates_of_rows
