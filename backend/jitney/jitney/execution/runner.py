"""A Batch in, a StepOutput out, in torch's own operations or in what replaced them at load.

The runner knows no sequences: a row brings its tokens, block table and parameters. From one step to
the next the runner keeps the K and V in the caches and, with overlap, the tokens that the latest
step samples. An exception in a step leaves the cache usable: slots of tokens that were not reported
back are written again.

A step is launched, then waited for. On a GPU its tokens stay there as the next step's inputs. So
the next step can be launched before :meth:`PendingStep.wait` has brought them to the host.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from jitney.batch import Batch, Row, RowOutput, StepOutput
from jitney.errors import DeviceLostError
from jitney.execution.attention import AttentionMetadata, BlockTables, build_metadata
from jitney.execution.draft import DraftModel
from jitney.execution.interface import LayerCache, LoadedModel, PagedStep
from jitney.execution.low_rank import Factors, LowRank, Site, zero_factors
from jitney.execution.machine import enter_device, is_out_of_memory, synchronize, to_device
from jitney.execution.row_samples import (
    LogitsPlan,
    RowPromptLogprobs,
    logprobs_in_pass,
    plan_logits,
    row_output,
    sampled_rows,
)
from jitney.execution.sampler import PendingSamples, SampledToken, sample
from jitney.execution.state_slots import StateSlots
from jitney.messages import ModelInfo

LOGITS_FLOATS = 1 << 28
"""Most logits of one forward pass if a row asks for prompt logprobs: more take several passes."""
_SAMPLED_FLOATS = 1 << 24
"""Logits that are sampled at once. Bounds the sampler's memory; no token depends on it."""

RunTokens = Callable[[Tensor, AttentionMetadata, Tensor], Tensor]
"""Called as ``run_tokens(ids, meta, indices)``: a forward pass over a step's T flattened tokens.

``ids`` is [T]. ``indices`` says which of the T tokens need logits; there is at least one. Returns
logits [len(indices), V], which the next call may overwrite."""


class _StepLogits(NamedTuple):
    """What the forward passes of a step gave."""

    logits: Tensor
    """[N, V], of the tokens that are sampled from."""
    sampled_from: list[int]
    """For each sample of the step, in order: its index among the N."""
    prompt_logprobs: dict[int, RowPromptLogprobs]
    """By the row's index."""


@dataclass(slots=True)
class PendingStep:
    """A step in flight: a ``protocols.LaunchedStep``."""

    rows: list[Row]
    samples: list[PendingSamples]
    """In slices: together, the samples of all rows in order."""
    prompt_logprobs: dict[int, RowPromptLogprobs]
    """By the row's index."""
    wait_until_idle: Callable[[], None]
    """Called if the step failed; returns when nothing is in flight."""
    output: StepOutput | None = None
    """Set once the device has it. A draft model then adds its proposals."""

    def wait(self) -> StepOutput:
        """The step's output, once the device has it. Raises whatever the device raises."""
        if self.output is None:
            self.output = self._collect()
        return self.output

    def outputs(self) -> list[RowOutput]:
        """The outputs of the rows; waits as :meth:`wait`."""
        return self.wait().rows

    def _collect(self) -> StepOutput:
        """Wait for the samples and share them out among the rows."""
        sampled: list[SampledToken] = []
        try:
            for part in self.samples:
                sampled += part.wait()
        except BaseException:
            self.wait_until_idle()
            raise
        outputs = []
        begin = 0
        for r, row in enumerate(self.rows):
            end = begin + row.num_samples
            outputs.append(row_output(row, sampled[begin:end], self.prompt_logprobs.get(r)))
            begin = end
        return StepOutput(rows=outputs)


class TorchRunner:
    """Owns the model, the KV cache and the device: the only thing that touches them in service.

    A ``protocols.Runner``. Not thread-safe: one thread calls it.
    """

    info: ModelInfo

    def __init__(
        self,
        model: LoadedModel,
        caches: list[LayerCache],
        info: ModelInfo,
        run_tokens: RunTokens | None = None,
        states: StateSlots | None = None,
    ) -> None:
        """``run_tokens``: what runs the model; by default :meth:`run_model`. ``states``: of a model
        with state layers."""
        self.info = info
        self._model = model
        self._device = model.device
        self._caches = caches
        self._states = states
        self._tables = BlockTables()
        self._run_tokens = run_tokens or self.run_model
        self._most_logits = max(1, LOGITS_FLOATS // info.vocab_size)
        """How many tokens may have logits in one forward pass."""
        self._sampled: Tensor | None = None
        """With overlap: the tokens that the step launched last samples, on the device."""
        self._draft: DraftModel | None = None

    def use_draft_model(self, draft: DraftModel) -> None:
        """From now on, show every step to this draft model, which proposes what rows ask for."""
        self._draft = draft

    def execute(self, batch: Batch) -> StepOutput:
        """Compute one step: copy blocks, write the new K and V, sample.

        Raises whatever the device raises; then no row of the batch may be taken as computed.
        """
        return self.launch(batch).wait()

    def launch(self, batch: Batch) -> PendingStep:
        """Queue a step behind those before it. Returns before a GPU is done, unless a row asks for
        prompt logprobs or for a draft model's proposal.

        Raises MemoryError if the device has too little memory, else whatever the device raises. If
        it raises, nothing is in flight any more.
        """
        enter_device(self._device)
        with torch.inference_mode():
            try:
                return self._launch(batch)
            except BaseException as error:
                self.wait_until_idle()
                if is_out_of_memory(error):
                    raise MemoryError(str(error)) from error
                raise

    def wait_until_idle(self) -> None:
        """After a step failed: forget the tokens that it sampled, and wait until nothing is in
        flight. Raises DeviceLostError if the device cannot even do that."""
        self._sampled = None
        try:
            synchronize(self._device)
        except Exception as fault:
            raise DeviceLostError("the device has failed for good") from fault

    def run_model(self, ids: Tensor, meta: AttentionMetadata, indices: Tensor) -> Tensor:
        """A :data:`RunTokens`: the model's own forward, over the runner's caches."""
        step = PagedStep(self._caches, meta, self._states)
        return self._model.forward(ids, meta.positions, indices, step)

    def warm_up(self, batches: Sequence[Batch]) -> None:
        """Compute these first steps, so that kernels are compiled and memory is touched. If
        requests may bring adapters, compute them once more with one: that takes other kernels."""
        for batch in batches:
            self.execute(batch)
        if self.sites:
            adapter = self.make_adapter("", zero_factors(self.sites, 1))
            for batch in batches:
                for row in batch.rows:
                    row.adapter = adapter
                self.execute(batch)

    @property
    def sites(self) -> Mapping[str, Site]:
        """The linear layers that adapters may change, by path; none without option ``adapters``."""
        return self._model.sites

    def make_adapter(self, version: str, factors: Mapping[str, Factors]) -> LowRank:
        """An adapter as steps take it, of factors on the CPU. Any thread may call it."""
        dtype = self._model.dtype
        device = self._device
        on_device = {
            path: Factors(a=pair.a.to(device, dtype), b=pair.b.to(device, dtype))
            for path, pair in factors.items()
        }
        packed = None
        if self._model.pack is not None:
            packed = self._model.pack(on_device)
        return LowRank(version, on_device, packed)

    def close(self) -> None:
        """Free the memory of module and cache. The runner cannot be used afterwards."""
        self._caches = []
        self._states = None
        self._sampled = None
        self._draft = None
        del self._model, self._run_tokens
        if self._device.type == "cuda":
            # cuBLAS keeps a workspace for every stream it was called on, 32 MiB each on an H100;
            # the stream that graphs are captured on is another one with every load.
            torch._C._cuda_clearCublasWorkspaces()
            torch.cuda.empty_cache()

    # ------------------------------------------------------------------ a step

    def _launch(self, batch: Batch) -> PendingStep:
        """Queue a step, without its clean-up in case of an error: see :meth:`launch`."""
        rows = list(batch.rows)
        # First, because rows read and write the copies.
        self._copy_blocks(batch.copies)
        if self._states is not None:
            self._states.copy(batch.slot_copies)
        if not rows:
            return PendingStep(
                rows=[], samples=[], prompt_logprobs={}, wait_until_idle=self.wait_until_idle
            )
        meta = build_metadata(
            rows,
            block_size=self.info.block_size,
            device=self._device,
            tables=self._tables,
        )
        ids = to_device([token for row in rows for token in row.token_ids], self._device)
        if self.info.overlap:
            # Before the model reads the ids, and before this step replaces ``_sampled``.
            self._insert_carried(rows, ids, meta)
        found = self._compute_logits(rows, ids, meta)
        if self._states is not None:
            self._states.copy(batch.snapshots)
        samples = sample_rows(rows, found.logits, found.sampled_from)
        if self.info.overlap:
            # The next step may be launched before this one is over: its rows take tokens from here.
            self._sampled = torch.cat([each.token_ids for each in samples]) if samples else None
        step = PendingStep(
            rows=rows,
            samples=samples,
            prompt_logprobs=found.prompt_logprobs,
            wait_until_idle=self.wait_until_idle,
        )
        if self._draft is not None:
            # Last, because it waits for the step's outputs if a row asks for a proposal.
            self._draft.follow(batch, meta, step.outputs)
        return step

    def _insert_carried(self, rows: list[Row], ids: Tensor, meta: AttentionMetadata) -> None:
        """Put the tokens that rows carry over from the step before into ``ids`` [T], on the device,
        without waiting for that step."""
        carried = [(r, row.carried) for r, row in enumerate(rows) if row.carried is not None]
        if not carried:
            return
        assert self._sampled is not None, "a row takes a token of a step that is not there"
        row_indices, sample_indices = to_device(carried, self._device).unbind(1)
        # The carried token is the only one of its row, so its index is that of the row's first.
        token_indices = meta.query_start[row_indices].long()
        ids[token_indices] = self._sampled[sample_indices]

    def _compute_logits(self, rows: list[Row], ids: Tensor, meta: AttentionMetadata) -> _StepLogits:
        """Run the model once, or in several passes if a row asks for prompt logprobs."""
        plan = plan_logits(rows)
        # A model computes logits of at least one token: if none is needed, those of token 0.
        tokens = to_device(plan.tokens or [0], self._device)
        if plan.targets:
            return self._run_in_passes(plan, tokens, ids, meta)
        logits = self._run_tokens(ids, meta, tokens)
        return _StepLogits(logits, plan.sampled_from, prompt_logprobs={})

    def _run_in_passes(
        self, plan: LogitsPlan, tokens: Tensor, ids: Tensor, meta: AttentionMetadata
    ) -> _StepLogits:
        """Run the model once for every ``_most_logits`` tokens of the plan, because all logits of a
        long prompt would not fit into memory. Each pass writes the same K and V again."""
        prompt_logprobs: dict[int, RowPromptLogprobs] = {r: [] for r in plan.targets}
        kept_indices = sorted(set(plan.sampled_from))  # each once
        kept: list[Tensor] = []
        # Nor may a state advance twice over the same tokens.
        slots = [row.slot for row in meta.slots]
        saved = None
        if self._states is not None:
            saved = self._states.save(slots)
        for begin in range(0, len(tokens), self._most_logits):
            if self._states is not None and saved is not None and begin > 0:
                self._states.restore(slots, saved)
            logits = self._run_tokens(ids, meta, tokens[begin : begin + self._most_logits])
            end = begin + len(logits)
            for r, targets in plan.targets.items():
                prompt_logprobs[r] += logprobs_in_pass(targets, logits, begin)
            # Only logits that are sampled from are kept: as a copy, because the next pass may
            # overwrite them.
            in_pass = [index - begin for index in kept_indices if begin <= index < end]
            kept.append(logits[to_device(in_pass, self._device)])

        # Indices of the plan count all of its tokens. Translate them into indices that count only
        # the logits that were kept.
        kept_index_of = {index: i for i, index in enumerate(kept_indices)}
        sampled_from = [kept_index_of[index] for index in plan.sampled_from]
        return _StepLogits(torch.cat(kept), sampled_from, prompt_logprobs)

    def _copy_blocks(self, copies: list[tuple[int, int]]) -> None:
        """All sources are read before any destination is written."""
        if not copies:
            return
        source, destination = to_device(copies, self._device).unbind(1)
        for layer in self._caches:
            for cache in (layer.keys, layer.values):
                # torch cannot index 8-bit floats. It can index bytes, so all 8-bit caches are
                # copied as bytes.
                if cache.itemsize == 1:
                    cache = cache.view(torch.uint8)
                cache[destination] = cache[source]


def sample_rows(
    rows: list[Row], logits: Tensor, sampled_from: Sequence[int]
) -> list[PendingSamples]:
    """Sample each (row, sequence) of a step, in order. ``sampled_from``: for each of these samples,
    the index of its logits among ``logits`` [N, V].

    In slices: prompts of n > 1 that end in one step can give a hundred times as many sequences as
    rows, and the sampler makes several copies of its logits.
    """
    pairs = [pair for row in rows for pair in sampled_rows(row)]
    size = max(1, _SAMPLED_FLOATS // logits.shape[1])
    samples = []
    for begin in range(0, len(pairs), size):
        end = begin + size
        taken = _take_rows(logits, list(sampled_from[begin:end]))
        samples.append(sample(taken, pairs[begin:end]))
    return samples


def _take_rows(logits: Tensor, indices: list[int]) -> Tensor:
    """``logits[indices]``: without a copy if the indices are consecutive, as they usually are."""
    first = indices[0]
    stop = indices[-1] + 1
    if indices == list(range(first, stop)):
        return logits[first:stop]
    return logits[to_device(indices, logits.device)]
