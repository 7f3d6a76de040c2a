"""The runner of a model with opaque caches: a Batch in, a StepOutput out, one sequence at a time.

It owns a cache object for each slot that a sequence holds (see ``core.slots``). Blocks are mere
account here: the scheduler gives them out so that no more tokens are kept than fit into memory, and
no tensor is behind them.

A row's part of the prompt is computed in one pass, and each token behind the prompt in a pass of
its own, also when it is computed again after a preemption. So a token's logits do not depend on
where a sequence was interrupted. If a step raises, the caches of its rows are of no use any more:
the scheduler begins these sequences anew.
"""

import logging
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from jitney.batch import Batch, Row, StepOutput
from jitney.errors import DeviceLostError
from jitney.execution.interface import LoadedModel
from jitney.execution.low_rank import (
    AdapterSpan,
    Factors,
    LowRank,
    Site,
    hook_layers,
    zero_factors,
)
from jitney.execution.machine import enter_device, is_out_of_memory, synchronize, to_device
from jitney.execution.opaque import Computed, OpaqueCache
from jitney.execution.row_samples import (
    LogitsPlan,
    PromptTargets,
    RowPromptLogprobs,
    logprobs_in_pass,
    plan_logits,
)
from jitney.execution.runner import LOGITS_FLOATS, PendingStep, sample_rows
from jitney.messages import ModelInfo

_log = logging.getLogger(__name__)

_SILENCE_S = 5.0
"""A step that takes longer says so each time."""


class _Piece(NamedTuple):
    """Tokens of a row that one pass computes."""

    start: int
    """Position of the first."""
    ids: list[int]


class _Progress:
    """Says in the log that a step goes on, if it takes long: an uncut prompt may take minutes, and
    so may the passes of an output that is computed again. The watchdog ends an engine that is
    silent for too long; a log record ends the silence."""

    def __init__(self) -> None:
        self._began = 0.0
        self._said = 0.0
        self._tokens = 0

    def begin(self, batch: Batch) -> None:
        """A step begins."""
        self._began = time.monotonic()
        self._said = self._began
        self._tokens = sum(len(row.token_ids) for row in batch.rows)

    def note(self) -> None:
        """A part of it has been computed."""
        now = time.monotonic()
        if now - self._said >= _SILENCE_S:
            self._said = now
            seconds = now - self._began
            _log.info("a step of %d tokens goes on after %.0f s", self._tokens, seconds)


class _Pass(NamedTuple):
    """What a pass over a piece, or over its first tokens, gave."""

    first: int
    """The first token of the piece of which there are logits; those behind it have some, too."""
    computed: Computed


@dataclass(slots=True)
class _StepLogits:
    """What the passes of a step gave."""

    sampled: list[Tensor] = field(default_factory=list)
    """[1, V] each, of the last token of each row that samples, in order."""
    prompt_logprobs: dict[int, RowPromptLogprobs] = field(default_factory=dict)
    """By the row's index."""


class OpaqueRunner:
    """Owns the model, the cache objects and the device. A ``protocols.Runner``. Not thread-safe:
    one thread calls it."""

    info: ModelInfo

    def __init__(self, model: LoadedModel, info: ModelInfo) -> None:
        assert model.opaque is not None
        self.info = info
        self._model = model
        self._opaque = model.opaque
        self._device = model.device
        self._progress = _Progress()
        self._opaque.after_each_layer(self._progress.note)
        self._caches: dict[int, OpaqueCache] = {}
        """By slot."""
        self._most_logits = max(1, LOGITS_FLOATS // info.vocab_size)
        """How many tokens may have logits at once."""

    # ------------------------------------------------------------------ steps

    def execute(self, batch: Batch) -> StepOutput:
        """Compute one step. Raises whatever the device raises; then no row of the batch may be
        taken as computed, and its sequences must begin anew."""
        return self.launch(batch).wait()

    def launch(self, batch: Batch) -> PendingStep:
        """Compute a step. Raises MemoryError if the device has too little memory, else whatever the
        device raises."""
        enter_device(self._device)
        with torch.inference_mode():
            try:
                return self._launch(batch)
            except BaseException as error:
                for row in batch.rows:  # to free memory, of which there may be too little
                    self._caches.pop(_slot_of(row), None)
                self.wait_until_idle()
                if is_out_of_memory(error):
                    raise MemoryError(str(error)) from error
                raise

    def wait_until_idle(self) -> None:
        """Wait until nothing is in flight. Raises DeviceLostError if the device cannot even do
        that."""
        try:
            synchronize(self._device)
        except Exception as fault:
            raise DeviceLostError("the device has failed for good") from fault

    def warm_up(self, batches: Sequence[Batch]) -> None:
        """Compute these first steps, so that memory is touched. If requests may bring adapters,
        compute them once more with one."""
        adapters: list[LowRank | None] = [None]
        if self.sites:
            adapters.append(self.make_adapter("", zero_factors(self.sites, 1)))
        for adapter in adapters:
            for batch in batches:
                for row in batch.rows:
                    row.slot = 0
                    row.adapter = adapter
                self.execute(batch)
        self._caches.clear()

    def _launch(self, batch: Batch) -> PendingStep:
        self._progress.begin(batch)
        rows = list(batch.rows)
        # The blocks that account for these caches may be in use for others by now.
        for slot in batch.released_slots:
            self._caches.pop(slot, None)
        self._copy_caches(batch.slot_copies)
        plan = plan_logits(rows)
        found = _StepLogits(prompt_logprobs={r: [] for r in plan.targets})
        for r, row in enumerate(rows):
            self._compute_row(r, row, plan, found)
        samples = []
        if found.sampled:
            sampled_from: list[int] = []
            for row in rows:
                if row.sample:  # all sequences of a prompt begin with the same logits
                    index = sampled_from[-1] + 1 if sampled_from else 0
                    sampled_from += [index] * len(row.sample)
            samples = sample_rows(rows, torch.cat(found.sampled), sampled_from)
        return PendingStep(
            rows=rows,
            samples=samples,
            prompt_logprobs=found.prompt_logprobs,
            wait_until_idle=self.wait_until_idle,
        )

    def _compute_row(self, r: int, row: Row, plan: LogitsPlan, found: _StepLogits) -> None:
        """Compute a row, which is the one with index ``r`` in its step."""
        slot = _slot_of(row)
        cache = None
        if row.start > 0:
            cache = self._caches[slot]
        # While it is computed, nobody else has the object: it may be changed in place.
        self._caches[slot] = None
        targets = plan.targets.get(r)
        logits = None
        for piece in _pieces(row):
            with hook_layers(self._model.module, _spans(row)):
                for each in self._passes(piece, cache, all_logits=targets is not None):
                    computed = each.computed
                    if targets is not None:
                        first = targets.first + piece.start - row.start + each.first
                        found.prompt_logprobs[r] += self._read(targets, computed.logits, first)
            cache = computed.cache
            logits = computed.logits
        self._caches[slot] = cache
        if row.sample:
            assert logits is not None
            found.sampled.append(logits[-1:])

    def _passes(self, piece: _Piece, cache: OpaqueCache, *, all_logits: bool) -> Iterator[_Pass]:
        """Compute a piece: the last pass has its cache.

        ``all_logits``: together the passes give the logits of all tokens. As these may not fit into
        memory at once, passes over the first tokens alone come before, each with the logits of its
        last tokens. (A module that cannot leave out the others gives all of them in one pass.)"""
        ids = to_device(piece.ids, self._device)
        first = len(ids) - 1
        if all_logits:
            first = 0
        while self._opaque.takes_num_logits and len(ids) - first > self._most_logits:
            end = first + self._most_logits
            own = self._opaque.copy(cache)
            yield _Pass(first, self._opaque.compute(ids[:end], piece.start, own, end - first))
            first = end
        yield _Pass(first, self._opaque.compute(ids, piece.start, cache, len(ids) - first))

    def _read(self, targets: PromptTargets, logits: Tensor, first: int) -> RowPromptLogprobs:
        """As ``logprobs_in_pass``, a part of the logits at a time: it makes copies of them."""
        read: RowPromptLogprobs = []
        for part in logits.split(self._most_logits):
            read += logprobs_in_pass(targets, part, first)
            first += len(part)
        return read

    def _copy_caches(self, copies: list[tuple[int, int]]) -> None:
        """All sources are read before any destination is written."""
        copied = {
            destination: self._opaque.copy(self._caches[source]) for source, destination in copies
        }
        self._caches.update(copied)

    # ------------------------------------------------------------------ adapters, and the end

    @property
    def sites(self) -> Mapping[str, Site]:
        """The linear layers that adapters may change, by path; none without option ``adapters``."""
        return self._model.sites

    def make_adapter(self, version: str, factors: Mapping[str, Factors]) -> LowRank:
        """An adapter as steps take it, of factors on the CPU. Any thread may call it."""
        on_device = {
            path: Factors(
                a=pair.a.to(self._device, self._model.dtype),
                b=pair.b.to(self._device, self._model.dtype),
            )
            for path, pair in factors.items()
        }
        return LowRank(version, on_device)

    def close(self) -> None:
        """Free the memory of module and caches. The runner cannot be used afterwards."""
        self._caches = {}
        del self._model, self._opaque
        if self._device.type == "cuda":
            torch.cuda.empty_cache()


def _slot_of(row: Row) -> int:
    assert row.slot is not None, "a row of a model with opaque caches has no slot"
    return row.slot


def _spans(row: Row) -> list[AdapterSpan]:
    """Whatever the row's passes compute is under its adapter, if it has one. That may be more than
    the pass's tokens: with latents, some modules make keys and values of the whole context anew."""
    if row.adapter is None:
        return []
    assert isinstance(row.adapter, LowRank)
    return [AdapterSpan(0, sys.maxsize, row.adapter)]


def _pieces(row: Row) -> Iterator[_Piece]:
    """What is computed at once: the row's part of the prompt, and each token behind it."""
    num_of_prompt = max(0, min(row.end, len(row.prompt)) - row.start)
    if num_of_prompt:
        yield _Piece(row.start, row.token_ids[:num_of_prompt])
    for index in range(num_of_prompt, len(row.token_ids)):
        yield _Piece(row.start + index, row.token_ids[index : index + 1])
