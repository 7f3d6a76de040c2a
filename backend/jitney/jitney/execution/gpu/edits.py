"""A step's edits of logits on the device: gathered from the rows, sent at once, one kernel.

Owned by ``sampler``. Does what ``execution.constraints`` does, for the rows that ask for it, on a
copy of their logits in f32. What a request's parameters say is put into arrays once.
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
    slots: Tensor
    """[S] i32: the row of ``logits``, or -1."""
    raw_maxima: Tensor
    """[E, tiles, padded] f32: the greatest before the edits."""


@dataclass(slots=True)
class _Lists:
    """What one request's parameters say of tokens. They are held so that their ids stay theirs."""

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
        self._contexts = Contexts(device)

    def forget(self) -> None:
        """After a step that failed midway."""
        self._contexts.forget()

    def launch(
        self, logits: Tensor, pairs: list[tuple[Row, int]], constrained: list[int]
    ) -> Edited:
        """Queue the edits of the ``constrained`` places of ``pairs``."""
        count = len(constrained)
        tokens, values, spans = _Sequence(), [], np.zeros((count, HEADER), dtype=np.int64)
        self._contexts.begin()
        contexts: list[tuple[int, int]] = []
        for e, place in enumerate(constrained):
            row, index = pairs[place]
            lists = self._lists_of(row)
            header = spans[e]
            header[0] = place
            header[1] = tokens.add(lists.allowed)
            forbidden = bad_endings(row.bad_words_ids, row.output) if row.bad_words_ids else ()
            first = tokens.add(np.array(forbidden, dtype=np.int32))
            last = tokens.add(lists.stops if ends_too_early(row) else _NO_IDS)
            header[2] = (first & 0xFFFF_FFFF) | (last >> 32 << 32)
            header[3] = tokens.add(lists.biased)
            values.append((int(header[3]) & 0xFFFF_FFFF, lists.biases))
            contexts.append(self._contexts.update(row, index) if penalizes(row) else (0, 0))
            _put_penalties(header, row.params)
        changed, changes = self._contexts.changes()
        for header, (slot, size) in zip(spans, contexts, strict=True):
            header[4] = _halves(slot * self._contexts.width, size)
        slots = np.full(len(pairs), -1, dtype=np.int32)
        slots[constrained] = np.arange(count, dtype=np.int32)
        biases = np.zeros(tokens.size, dtype=np.float32)
        for begin, part in values:
            biases[begin : begin + len(part)] = part
        on_device = self._send([spans, changed, changes, slots, tokens.whole(), biases])
        return self._run(logits, on_device, count)

    def _run(self, logits: Tensor, sent: list[Tensor], count: int) -> Edited:
        spans, changed, changes, slots, tokens, biases = sent
        if changed.numel():
            self._contexts.apply(changed, changes.view(-1, 2))
        edited = torch.empty((count, self._vocab_size), dtype=torch.float32, device=self._device)
        raw = torch.empty((count, self.raw), dtype=torch.float32, device=self._device)
        edit[(count, self._tiles)](
            logits, logits.stride(0), spans, tokens, biases, self._contexts.pool, edited, raw,
            self._vocab_size, RAW=self.raw, num_warps=8,
        )  # fmt: skip
        return Edited(edited, slots, raw)

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
            buffer[begin : begin + array.nbytes] = (
                np.ascontiguousarray(array).view(np.uint8).ravel()
            )
        # The allocator of pinned memory gives this out again only when the copy is done.
        device = host.to(self._device, non_blocking=True)
        return [
            device[begin : begin + array.nbytes].view(_TYPES[array.dtype.type])
            for begin, array in zip(begins, arrays, strict=True)
        ]


_TYPES = {np.int64: torch.int64, np.int32: torch.int32, np.float32: torch.float32}


class _Sequence:
    """Lists of ids, one after the other."""

    def __init__(self) -> None:
        self._parts: list[_Ids] = []
        self.size = 0

    def add(self, ids: _Ids) -> int:
        """Append; returns begin and end as the halves of a word."""
        begin = self.size
        if ids.size:
            self._parts.append(ids)
            self.size += ids.size
        return _halves(begin, self.size)

    def whole(self) -> _Ids:
        return np.concatenate(self._parts) if self._parts else _NO_IDS


def _halves(low: int, high: int) -> int:
    """A word of two numbers from 0 to 2³¹ − 1."""
    return low | high << 32


def _put_penalties(header: npt.NDArray[np.int64], params: SamplingParams) -> None:
    header.view(np.float32)[10] = params.repetition_penalty
    header.view(np.float64)[6:] = params.frequency_penalty, params.presence_penalty


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
