"""A step's edits of logits on the device: gathered from the rows, sent at once, one kernel.

Owned by ``sampler``. Does what ``execution.constraints`` does, for the rows that ask for it, on a
copy of their logits in f32. What the rows name is sent when it is not what they named in the last
step; of penalized contexts a step sends what is new.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from jitney.execution.constraints import bad_endings, ends_too_early, penalizes
from jitney.execution.gpu.contexts import Contexts
from jitney.execution.gpu.edit_kernels import HEADER, TILE, edit
from jitney.request import Row
from jitney.sampling_params import SamplingParams

_Ids = npt.NDArray[np.int32]
_NO_IDS: _Ids = np.zeros(0, dtype=np.int32)
# Requests whose arrays are kept: more than are ever in a step as a rule.
_KEPT = 4096


@dataclass(slots=True)
class Edited:
    """One step's: what the kernels of sampling read in place of the logits."""

    logits: Tensor
    """[E, V] f32."""
    places: Tensor
    """[E] i32: of which rows they are."""
    others: Tensor
    """[S − E] i32: the rows that are not edited."""
    raw_maxima: Tensor
    """[E, tiles, padded] f32: the greatest before the edits."""


@dataclass(slots=True)
class _Named:
    """What the rows of a step name, on the device: valid for any step with the same key."""

    key: tuple[object, ...]
    headers: Tensor
    """[E, HEADER] i64."""
    places: Tensor
    others: Tensor
    tokens: Tensor
    values: Tensor


@dataclass(slots=True)
class _Lists:
    """What one request's parameters say of tokens."""

    params: SamplingParams
    stop_ids: frozenset[int]
    allowed: _Ids
    stops: _Ids
    biased: _Ids
    biases: npt.NDArray[np.float32]


class Edits:
    """Owns the arrays of requests and the contexts of penalized sequences."""

    def __init__(self, device: torch.device, vocab_size: int) -> None:
        self._device = device
        self._vocab_size = vocab_size
        self._tiles = -(-vocab_size // TILE)
        self.raw = 1 << (self._tiles - 1).bit_length()
        """Tiles, to a power of two: the width of ``Edited.raw_maxima``."""
        self._lists: dict[int, _Lists] = {}
        self._named: _Named | None = None
        self._contexts = Contexts(device)

    def forget(self) -> None:
        """After a step that failed midway."""
        self._named = None
        self._contexts.forget()

    def launch(
        self, logits: Tensor, pairs: list[tuple[Row, int]], constrained: list[int]
    ) -> Edited:
        """Queue the edits of the ``constrained`` places of ``pairs``."""
        count = len(constrained)
        rows = [pairs[place][0] for place in constrained]
        named = self._name(constrained, rows, len(pairs))
        contexts = self._follow([pairs[place] for place in constrained])
        edited = torch.empty((count, self._vocab_size), dtype=torch.float32, device=self._device)
        raw = torch.empty((count, self.raw), dtype=torch.float32, device=self._device)
        edit[(count, self._tiles)](
            logits, logits.stride(0), named.headers, named.tokens, named.values, contexts,
            self._contexts.pool, edited, raw, self._vocab_size, RAW=self.raw, num_warps=8,
        )  # fmt: skip
        return Edited(edited, named.places, named.others, raw)

    def _follow(self, pairs: list[tuple[Row, int]]) -> Tensor:
        """[E, 2] i32: where in the pool each row's context begins, and how many tokens it has."""
        self._contexts.begin()
        spans = np.zeros((len(pairs), 2), dtype=np.int32)
        for e, (row, index) in enumerate(pairs):
            if penalizes(row):
                spans[e] = self._contexts.update(row, index)
        changed, changes = self._contexts.changes()
        spans[:, 0] *= self._contexts.width
        sent, places, values = self._send([spans, changed, changes])
        if len(changed):
            self._contexts.apply(places, values.view(-1, 2))
        return sent

    def _name(self, constrained: list[int], rows: list[Row], count: int) -> _Named:
        """Headers and lists, as they are from the last step if nothing of them is new."""
        early = [row.params.min_tokens > 0 and ends_too_early(row) for row in rows]
        endings = [
            bad_endings(row.bad_words_ids, row.output) if row.bad_words_ids else [] for row in rows
        ]
        asked = [row.params for row in rows], [row.stop_ids for row in rows]
        key = (count, constrained, early, endings, *asked)
        if self._named is None or self._named.key != key:
            arrays = self._gather(constrained, rows, early, endings, count)
            self._named = _Named(key, *self._send(arrays))
        return self._named

    def _gather(
        self,
        constrained: list[int],
        rows: list[Row],
        early: list[bool],
        endings: list[list[int]],
        count: int,
    ) -> list[npt.NDArray]:
        """As the fields of ``_Named``."""
        headers = np.zeros((len(rows), HEADER), dtype=np.int64)
        floats, doubles = headers.view(np.float32), headers.view(np.float64)
        tokens: list[_Ids] = []
        biases: list[npt.NDArray[np.float32]] = []
        size = 0
        for e, row in enumerate(rows):
            lists = self._lists_of(row)
            stops = lists.stops if early[e] else _NO_IDS
            forbidden = np.array(endings[e], dtype=np.int32) if endings[e] else _NO_IDS
            begin_forbidden = size + lists.allowed.size
            begin_biased = begin_forbidden + forbidden.size + stops.size
            end = begin_biased + lists.biased.size
            headers[e, :4] = (
                constrained[e],
                _span(size, begin_forbidden),
                _span(begin_forbidden, begin_biased),
                _span(begin_biased, end),
            )
            params = row.params
            floats[e, 8] = params.repetition_penalty
            doubles[e, 5:] = params.frequency_penalty, params.presence_penalty
            tokens += (lists.allowed, forbidden, stops, lists.biased)
            biases += (np.zeros(begin_biased - size, dtype=np.float32), lists.biases)
            size = end
        places = np.array(constrained, dtype=np.int32)
        others = np.setdiff1d(np.arange(count, dtype=np.int32), places)
        return [headers, places, others, np.concatenate(tokens), np.concatenate(biases)]

    def _lists_of(self, row: Row) -> _Lists:
        lists = self._lists.get(row.key)
        if lists is None or lists.params is not row.params or lists.stop_ids != row.stop_ids:
            if len(self._lists) >= _KEPT:
                self._lists.clear()
            lists = self._lists[row.key] = _make_lists(row)
        return lists

    def _send(self, arrays: list[npt.NDArray]) -> list[Tensor]:
        """All of them in one copy; each begins at a multiple of 16 bytes, for wide loads."""
        begins, size = [], 0
        for array in arrays:
            begins.append(size)
            size += -(-array.nbytes // 16) * 16
        host = torch.empty(size, dtype=torch.uint8, pin_memory=self._device.type == "cuda")
        buffer = host.numpy()
        for begin, array in zip(begins, arrays, strict=True):
            buffer[begin : begin + array.nbytes] = array.view(np.uint8).ravel()
        # The allocator of pinned memory gives this out again only when the copy is done.
        device = host.to(self._device, non_blocking=True)
        return [
            device[begin : begin + array.nbytes].view(_TYPES[array.dtype.type])
            for begin, array in zip(begins, arrays, strict=True)
        ]


_TYPES = {np.int64: torch.int64, np.int32: torch.int32, np.float32: torch.float32}


def _span(begin: int, end: int) -> int:
    """A word of two numbers from 0 to 2³¹ − 1."""
    return begin | end << 32


def _make_lists(row: Row) -> _Lists:
    params = row.params
    bias = params.logit_bias or {}
    return _Lists(
        params=params,
        stop_ids=row.stop_ids,
        allowed=np.array(params.allowed_token_ids or (), dtype=np.int32),
        stops=np.array(sorted(row.stop_ids), dtype=np.int32),
        biased=np.array(list(bias), dtype=np.int32),
        biases=np.array(list(bias.values()), dtype=np.float32),
    )
