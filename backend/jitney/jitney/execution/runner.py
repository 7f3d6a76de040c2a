"""A Batch in, a StepOutput out: the only thing that touches the model and the KV cache in service.

:func:`load_runner` makes a :class:`Runner`, or a ``gpu.runner.GpuRunner`` where the GPU's attention
kernels run; the engine's thread calls it once per step. A runner keeps no request: everything about
a row stands in the row. An exception in a step leaves the cache usable: slots of tokens that were
not reported back are written again.
"""

import logging
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from jitney.config import EngineConfig
from jitney.execution.attention import BlockTables, build_metadata
from jitney.execution.fuse import fuse_modules
from jitney.execution.interface import LayerCache, PagedStep, forward
from jitney.execution.linear import prepack_linears
from jitney.execution.load import (
    allocate_caches,
    cache_dtype,
    check_gpu_options,
    describe,
    enter_device,
    log_loaded,
    runs_gpu_kernels,
    step_activations,
    warm_up,
)
from jitney.execution.machine import available_cores, available_memory
from jitney.execution.memory import plan_memory
from jitney.execution.models import LoadedModel, load_model, resolve_device
from jitney.execution.probe import check_same, probe_logits
from jitney.execution.sampler import Sampled, prompt_logprobs, sample, select_greatest
from jitney.execution.wanted import Wanted, row_output
from jitney.request import Batch, ModelInfo, Row, StepOutput

if TYPE_CHECKING:  # needs the Triton language
    from jitney.execution.gpu.runner import GpuRunner

_log = logging.getLogger(__name__)

_BUDGET = {"cpu": 512, "cuda": 8192}
# Logits that are sampled at once. Bounds the sampler's memory; how a step is cut changes no token.
_SAMPLED_FLOATS = 1 << 24


class Runner:
    """Owns the module, the KV cache and the device. Not thread-safe: one thread calls it."""

    info: ModelInfo

    def __init__(self, model: LoadedModel, caches: list[LayerCache], info: ModelInfo) -> None:
        self.info = info
        self._module = model.module
        self._device = model.device
        self._caches = caches
        self._tables = BlockTables()
        self._greatest = select_greatest(model.device, model.dtype)

    def execute(self, batch: Batch) -> StepOutput:
        """Compute one step: copy blocks, write the new K and V, sample.

        Raises whatever the device raises; then no row of the batch may be taken as computed.
        """
        rows = batch.rows
        enter_device(self._device)
        with torch.inference_mode():
            self._copy_blocks(batch.copies)
            if not rows:
                return StepOutput(rows=[])
            meta = build_metadata(rows, self.info.block_size, self._device, self._tables)
            ids = self._put([token for row in rows for token in row.token_ids])
            wanted = Wanted(rows)
            logits = forward(
                self._module,
                ids,
                meta.positions,
                self._put(wanted.tokens or [0]),
                PagedStep(self._caches, meta),
            )
            return self._outputs(rows, wanted, logits)

    def close(self) -> None:
        """Give the memory of module and cache back. The runner is of no use afterwards."""
        self._caches = []
        del self._module
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _copy_blocks(self, copies: list[tuple[int, int]]) -> None:
        """All sources are read before any destination is written."""
        if not copies:
            return
        source, destination = self._put(copies).unbind(1)
        for keys, values, *_ in self._caches:
            keys[destination] = keys[source]
            values[destination] = values[source]

    def _outputs(self, rows: list[Row], wanted: Wanted, logits: Tensor) -> StepOutput:
        sampled = self._sample(rows, wanted.sampled_of_pairs, logits)
        outputs, done = [], 0
        for r, row in enumerate(rows):
            output = row_output(row, sampled[done : done + len(row.sample)])
            done += len(row.sample)
            if r in wanted.prompt and output.error is None:
                first, targets = wanted.prompt[r]
                k = row.params.prompt_logprobs
                assert k is not None
                part = logits[first : first + len(targets)]
                output.prompt_logprobs = prompt_logprobs(part, targets, k)
            outputs.append(output)
        return StepOutput(rows=outputs)

    def _sample(self, rows: list[Row], sources: list[int], logits: Tensor) -> list[Sampled]:
        """For each (row, sequence) of the step, in order; ``sources`` are its rows of ``logits``.

        In slices: prompts of n > 1 that end in one step can give a hundred times as many sequences
        as rows, and the sampler makes several copies of its logits.
        """
        pairs = [(row, index) for row in rows for index in row.sample]
        size = max(1, _SAMPLED_FLOATS // logits.shape[1])
        sampled: list[Sampled] = []
        for begin in range(0, len(pairs), size):
            places = sources[begin : begin + size]
            first, last = places[0], places[-1] + 1
            if places == list(range(first, last)):  # as a rule each row of logits, once
                part = logits[first:last]
            else:
                part = logits[self._put(places)]
            sampled += sample(part, pairs[begin : begin + size], self._greatest)
        return sampled

    def _put(self, values: Sequence[int] | Sequence[tuple[int, int]]) -> Tensor:
        """int64 on the device."""
        array = np.asarray(values, dtype=np.int64)
        return torch.from_numpy(array).to(self._device, non_blocking=True)


def load_runner(config: EngineConfig) -> "Runner | GpuRunner":
    """Load the model, size and allocate the KV cache, log the ledger, warm the kernels up.

    Raises a LoadError of ``errors`` for whatever is wrong with options, files or architecture.
    Sets the number of threads of the process's tensor operations.
    """
    torch.set_num_threads(config.threads or available_cores())
    begin = time.monotonic()
    enter_device(resolve_device(config.device))  # kernels of our own run on the thread's device
    model = load_model(config)
    budget = config.max_num_batched_tokens or _BUDGET[model.device.type]
    if runs_gpu_kernels(config, model):
        from jitney.execution.gpu.load import load_gpu_runner

        return load_gpu_runner(config, model, budget, begin)
    check_gpu_options(config)
    added = _speed_up(config, model, budget)
    dtype = cache_dtype(config, model)
    ledger = plan_memory(
        config,
        model.layers,
        dtype=dtype,
        device=model.device,
        weights=model.weight_bytes + added,
        activations=step_activations(config, model, budget),
        available=available_memory(model.device),
        max_model_len=model.max_model_len,
    )
    caches = allocate_caches(config, model, ledger, dtype)
    info = describe(model, caches, ledger, budget)
    runner = Runner(model, caches, info)
    warm_up(runner)
    log_loaded(model, info, ledger, begin)
    return runner


def _speed_up(config: EngineConfig, model: LoadedModel, budget: int) -> int:
    """Rearrange a loaded module for the CPU, as far as the options say, and check that it still
    gives the same. Returns the bytes that this adds to its weights."""
    if model.device.type != "cpu":
        return 0
    before = probe_logits(model.module, model.layers)
    rows = min(budget, config.max_num_seqs)
    added = 0
    if config.fuse:
        fused = fuse_modules(model.module, rows)
        added = fused.added_bytes
        _log.info(
            "fused %d layers, %d gated MLPs, %d norms%s",
            fused.layers,
            fused.mlps,
            fused.norms,
            "; a step's layers are one native call" if fused.program else "",
        )
        for reason, count in fused.reasons.items():
            _log.info("not fused (%d): %s", count, reason)
    if config.prepack:
        packed = prepack_linears(model.module, rows)
        added += packed.added_bytes
        if packed.reason is not None:
            _log.info("no linear layers prepacked: %s", packed.reason)
    after = probe_logits(model.module, model.layers, config.attention, config.block_size)
    check_same(before, after, model.module)
    return added
