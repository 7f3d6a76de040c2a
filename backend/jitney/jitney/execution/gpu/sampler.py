"""Logits to tokens on the device: what ``execution.sampler`` gives, without the host waiting.

Called by the GPU's runner once a step: :meth:`DeviceSampler.launch` queues the work, the token ids
stay on the device as the next step's inputs, and :meth:`LaunchedSamples.wait` brings them to the
host when they are wanted there. A step costs two kernels; one or three more if all or some of its
requests edit their logits, and a few of torch's if they ask for log-probabilities; one copy to the
host; and no copy to the device where it asks for the same as the last one did, as steps of running
sequences do.

Random numbers are made on the device, from the position of a token (see ``sampling_kernels``). The
positions stay there too, and a step says only by how much all of them have grown.
"""

import math
import struct
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from jitney.errors import InternalError, InvalidArgumentError
from jitney.execution.constraints import constrains
from jitney.execution.gpu.edits import Edits
from jitney.execution.gpu.filter_kernels import CHUNK, GROUP
from jitney.execution.gpu.sampling_kernels import DRAWS, FILTERS, FORBIDDEN, WORDS, scan, select
from jitney.execution.sampler import ALL_FORBIDDEN, NOT_FINITE, Sampled, measure, name_candidates
from jitney.request import Row
from jitney.sampling_params import SamplingParams

# Floats of one slice of log-probabilities: bounds their memory, of which there are a few copies.
_SLICE_FLOATS = 1 << 24
# seed, top_p, temperature, -log(min_p), top_k, kind: the first words of a row's parameters.
_RECORD = struct.Struct("<qdffii")
# Records that are kept: more than there are requests in a step.
_KEPT = 4096


@dataclass(slots=True)
class _Asked:
    """What the requests of a step ask for, kept while the next ones' ask for the same."""

    key: list[object]
    """Parameters and bad words of each pair: where they are equal, so is the rest."""
    draws: bool
    """Whether any row is not greedy."""
    edited: list[int]
    """Places of rows whose logits are edited in every step."""
    watched: list[int]
    """Places of rows whose logits are edited in some steps."""
    measured: list[int]
    """Places of rows that want log-probabilities."""
    counts: list[int]
    """How many each of those wants."""
    index: Tensor | None = None
    """``measured`` on the device, where these are not all rows."""
    placed: "_Placed | None" = None


@dataclass(slots=True)
class _Placed:
    """What the device knows of the rows that it draws for."""

    indices: list[int]
    positions: npt.NDArray[np.int64]
    words: Tensor
    """[S, WORDS] i64 on the device: parameters, ``indices``, ``positions``."""


class LaunchedSamples:
    """One step's samples, on their way."""

    def __init__(
        self,
        token_ids: Tensor,
        host: Tensor,
        copied: torch.cuda.Event | None,
        asked: _Asked,
    ) -> None:
        self.token_ids = token_ids
        """[S] int64 on the device. 0 for a sequence that drew nothing."""
        self._host = host
        """i32 words: token ids and statuses (i64), then log-probabilities, if any were asked for.
        """
        self._copied = copied
        self._asked = asked

    def wait(self) -> list[Sampled]:
        """The samples, parallel to the pairs of the launch. Blocks until the device has them."""
        if self._copied is not None:
            self._copied.synchronize()
        words = self._host.numpy()
        count = len(self.token_ids)
        tokens, status = words[: 4 * count].view(np.int64).reshape(2, count)
        results = [Sampled(token) for token in tokens.tolist()]
        if self._asked.measured:
            self._attach_logprobs(results, words[4 * count :])
        if status.any():
            for place in status.nonzero()[0].tolist():
                results[place] = Sampled(-1, error=_error(int(status[place])))
        return results

    def _attach_logprobs(self, results: list[Sampled], words: npt.NDArray[np.int32]) -> None:
        places, counts = self._asked.measured, self._asked.counts
        table = words.reshape(len(places), -1)
        width = table.shape[1] // 2 - 1
        listed = name_candidates(
            [results[place].token_id for place in places],
            counts,
            table[:, 0].view(np.float32).tolist(),
            table[:, 1].tolist(),
            table[:, 2 : 2 + width].view(np.float32).tolist(),
            table[:, 2 + width :].tolist(),
        )
        for place, candidates in zip(places, listed, strict=True):
            results[place].logprobs = candidates


class DeviceSampler:
    """Owns what sampling keeps between steps. One thread calls it, and two steps may be in flight,
    in the order of their launches on one stream.

    Works on a CPU's tensors too where kernels are interpreted.
    """

    def __init__(self, device: torch.device, vocab_size: int) -> None:
        self._device = device
        self._pinned = device.type == "cuda"
        self._vocab_size = vocab_size
        chunks = -(-vocab_size // CHUNK)
        self._groups = -(-chunks // GROUP)
        # A power of two, for the tiles that hold one number per chunk; 4 keep loads aligned.
        self._chunks = 1 << max(chunks - 1, 3).bit_length()
        self._every = torch.zeros(0, dtype=torch.int32, device=device)
        self._edits = Edits(device, vocab_size)
        self._asked: _Asked | None = None
        self._records: dict[int, tuple[SamplingParams, bytes]] = {}

    def launch(self, logits: Tensor, pairs: list[tuple[Row, int]]) -> LaunchedSamples:
        """Queue the draw of the next token of each pair (row, sequence index).

        ``logits`` [S, V], bf16, f16 or f32, is parallel to ``pairs`` and is left as it is; its rows
        may lie apart. All of it is read in stream order, so that it may be written again after
        this. The position of a new token is ``row.end``. The host waits for nothing.
        """
        assert logits.shape == (len(pairs), self._vocab_size)
        try:
            return self._launch(logits if logits.stride(1) == 1 else logits.contiguous(), pairs)
        except BaseException:
            # What of it the device did, and so what it keeps, is not known.
            self._asked = None
            self._edits.forget()
            raise

    def warm_up(self, dtype: torch.dtype) -> None:
        """Compile what steps with logits of this type may launch, some seconds' work in all, and
        wait for it."""
        logits = torch.zeros((1, self._vocab_size), dtype=dtype, device=self._device)
        for temperature in (0.0, 1.0):
            for bias in (None, {0: 1.0}):
                params = SamplingParams(temperature=temperature, top_p=0.5, seed=0, logit_bias=bias)
                self.launch(logits, [(_dummy_row(params), 0)]).wait()

    def _launch(self, logits: Tensor, pairs: list[tuple[Row, int]]) -> LaunchedSamples:
        asked = self._ask(pairs)
        out = torch.empty((2, len(pairs)), dtype=torch.int64, device=self._device)
        if pairs:
            self._select(logits, pairs, asked, out)
        words = out.view(-1).view(torch.int32)
        if asked.measured:
            words = torch.cat((words, self._measure(logits, out[0], asked)))
        copied = None
        if self._pinned:
            # The allocator of pinned memory gives it out again when host and device are done.
            host = torch.empty(words.shape, dtype=torch.int32, pin_memory=True)
            host.copy_(words, non_blocking=True)
            copied = torch.cuda.Event()
            copied.record()
        else:
            host = words
        return LaunchedSamples(out[0], host, copied, asked)

    def _select(
        self, logits: Tensor, pairs: list[tuple[Row, int]], asked: _Asked, out: Tensor
    ) -> None:
        """Launch the kernels: for the rows whose logits are edited, and for the others. A row's
        are the same ones, compiled for the same, whatever the others of its batch ask for."""
        rows = len(pairs)
        constrained = asked.edited
        if asked.watched:
            now = [place for place in asked.watched if constrains(pairs[place][0])]
            constrained = sorted(constrained + now)
        words, delta = self._place(asked, pairs) if asked.draws else (out, 0)
        shape = (4 if asked.draws else 1, rows, self._chunks)
        work = torch.empty(shape, dtype=torch.float32, device=self._device)
        maxima, sums, kept, lists = work if asked.draws else (work[0],) * 4
        parts = [(logits, self._all_places(rows), maxima, False)]  # (…, no raw maxima, …)
        if constrained:
            edits = self._edits.launch(logits, pairs, constrained)
            parts = [
                (logits, edits.others, maxima, False),
                (edits.logits, edits.places, edits.raw_maxima, True),
            ]
        for source, places, raw_maxima, edited in parts:
            if not len(places):
                continue
            scan[(len(places), self._groups)](
                source, source.stride(0), places, words, maxima, sums, self._vocab_size,
                CHUNKS=self._chunks, ANY_DRAWS=asked.draws, EDITED=edited, num_warps=4,
            )  # fmt: skip
            select[(len(places),)](
                source, source.stride(0), places, raw_maxima, words, maxima, sums,
                lists.view(torch.int32), kept, out, rows, delta, self._vocab_size,
                CHUNKS=self._chunks, RAW=self._edits.raw, ANY_DRAWS=asked.draws, EDITED=edited,
                num_warps=8,
            )  # fmt: skip

    def _all_places(self, rows: int) -> Tensor:
        """[rows] i32 on the device: 0, 1, 2 and so on."""
        if len(self._every) < rows:
            size = 1 << (rows - 1).bit_length()
            self._every = torch.arange(size, dtype=torch.int32, device=self._device)
        return self._every[:rows]

    def _ask(self, pairs: list[tuple[Row, int]]) -> _Asked:
        """What this step asks for: as a rule what the last one did, which a comparison by identity
        shows."""
        key: list[object] = [row.params for row, _ in pairs]
        key += [row.bad_words_ids for row, _ in pairs]
        if self._asked is None or self._asked.key != key:
            self._asked = self._ask_anew(key, [row for row, _ in pairs])
        return self._asked

    def _ask_anew(self, key: list[object], rows: list[Row]) -> _Asked:
        measured, counts = [], []
        for place, row in enumerate(rows):
            if row.params.logprobs is not None:
                measured.append(place)
                counts.append(row.params.logprobs)
        asked = _Asked(
            key=key,
            draws=not all(row.params.greedy for row in rows),
            edited=[place for place, row in enumerate(rows) if _always_edits(row)],
            watched=[
                place
                for place, row in enumerate(rows)
                if _sometimes_edits(row) and not _always_edits(row)
            ],
            measured=measured,
            counts=counts,
        )
        if 0 < len(measured) < len(rows):
            asked.index = self._put(np.array(measured, dtype=np.int64))
        return asked

    def _place(self, asked: _Asked, pairs: list[tuple[Row, int]]) -> tuple[Tensor, int]:
        """Each row's parameters, on the device, and what is to be added to the positions there."""
        indices = [index for _, index in pairs]
        ends = (row.start + len(row.token_ids) for row, _ in pairs)
        positions = np.fromiter(ends, np.int64, len(pairs))
        placed = asked.placed
        if placed is not None and placed.indices == indices:
            grown = positions - placed.positions
            delta = int(grown[0])
            if (grown == delta).all():
                return placed.words, delta
        records = b"".join([self._record(row.params) for row, _ in pairs])
        words = np.empty((len(pairs), WORDS), dtype=np.int64)
        words[:, :4] = np.frombuffer(records, dtype=np.int64).reshape(-1, 4)
        words[:, 4] = indices
        words[:, 5] = positions
        asked.placed = _Placed(indices, positions, self._put(words))
        return asked.placed.words, 0

    def _record(self, params: SamplingParams) -> bytes:
        """The parameters as the kernels read them, made once for each request."""
        known = self._records.get(id(params))
        if known is None:
            if len(self._records) >= _KEPT:
                self._records.clear()
            # The parameters stand beside it so that nothing else gets their id.
            known = self._records[id(params)] = (params, _pack(params, self._vocab_size))
        return known[1]

    def _measure(self, logits: Tensor, token_ids: Tensor, asked: _Asked) -> Tensor:
        """The raw distribution's log-probabilities, as flat i32 words: of each row that wants some
        its token's, that one's rank, the best ones' and their ids."""
        width = min(max(asked.counts), self._vocab_size)
        size = max(1, _SLICE_FLOATS // self._vocab_size)
        parts = []
        for begin in range(0, len(asked.measured), size):
            if asked.index is None:
                chosen, rows = token_ids[begin : begin + size], logits[begin : begin + size]
            else:
                index = asked.index[begin : begin + size]
                chosen, rows = token_ids[index], logits[index]
            own, ranks, best, best_ids = measure(rows, chosen, width)
            floats = (own.unsqueeze(1).view(torch.int32), best.view(torch.int32))
            ints = (ranks.unsqueeze(1).int(), best_ids.int())
            parts.append(torch.cat((floats[0], ints[0], floats[1], ints[1]), dim=1).view(-1))
        return torch.cat(parts)

    def _put(self, array: npt.NDArray[np.int64]) -> Tensor:
        host = torch.from_numpy(array)
        return host.pin_memory().to(self._device, non_blocking=True) if self._pinned else host


def _dummy_row(params: SamplingParams) -> Row:
    return Row(
        key=-1,  # the engine's are not negative
        index=0,
        token_ids=[0],
        start=0,
        block_table=[],
        sample=(0,),
        params=params,
        prompt=[0],
        output=[],
        stop_ids=frozenset(),
        bad_words_ids=[],
    )


def _pack(params: SamplingParams, vocab_size: int) -> bytes:
    assert params.seed is not None, "a request gets its seed at submission"
    top_k = params.top_k if 0 < params.top_k < vocab_size else 0
    distance = abs(math.log(params.min_p)) if params.min_p > 0.0 else math.inf
    filters = top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0
    kind = 0 if params.greedy else DRAWS | (FILTERS if filters else 0)
    return _RECORD.pack(params.seed, params.top_p, params.temperature, distance, top_k, kind)


def _always_edits(row: Row) -> bool:
    """Whether ``constrains`` holds for this row's sequence in every step."""
    params = row.params
    return bool(
        params.allowed_token_ids is not None
        or row.bad_words_ids
        or params.logit_bias
        or params.repetition_penalty != 1.0
    )


def _sometimes_edits(row: Row) -> bool:
    """Whether it may hold in some step."""
    params = row.params
    return bool(params.min_tokens or params.frequency_penalty or params.presence_penalty)


def _error(status: int) -> InternalError | InvalidArgumentError:
    return InvalidArgumentError(ALL_FORBIDDEN) if status == FORBIDDEN else InternalError(NOT_FINITE)
