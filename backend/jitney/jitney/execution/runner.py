"""A Batch in, a StepOutput out: the only thing that touches the model and the KV cache in service.

:func:`load_runner` makes a :class:`Runner`; the engine's thread calls :meth:`Runner.execute` once
per step. The runner keeps no request: everything about a row stands in the row. An exception in a
step leaves the cache usable: slots of tokens that were not reported back are written again.
"""

import logging
import math
import time
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from jitney.config import EngineConfig
from jitney.errors import ConfigError
from jitney.execution.attention import BlockTables, build_metadata
from jitney.execution.fuse import fuse_modules
from jitney.execution.interface import LayerCache, PagedStep, forward
from jitney.execution.linear import prepack_linears
from jitney.execution.machine import available_cores, available_memory
from jitney.execution.memory import Ledger, estimate_activations, make_layer_caches, plan_memory
from jitney.execution.models import LoadedModel, load_model, resolve_dtype
from jitney.execution.probe import check_same, probe_logits
from jitney.execution.sampler import Sampled, prompt_logprobs, sample, select_greatest
from jitney.request import Batch, ModelInfo, Row, RowOutput, StepOutput
from jitney.sampling_params import SamplingParams

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
        with torch.inference_mode():
            self._copy_blocks(batch.copies)
            if not rows:
                return StepOutput(rows=[])
            meta = build_metadata(rows, self.info.block_size, self._device, self._tables)
            ids = self._put([token for row in rows for token in row.token_ids])
            wanted = _Wanted(rows)
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
        for keys, values, _ in self._caches:
            keys[destination] = keys[source]
            values[destination] = values[source]

    def _outputs(self, rows: list[Row], wanted: "_Wanted", logits: Tensor) -> StepOutput:
        sampled = self._sample(rows, wanted.sampled_of_pairs, logits)
        outputs, done = [], 0
        for r, row in enumerate(rows):
            output = _row_output(row, sampled[done : done + len(row.sample)])
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


class _Wanted:
    """Which of the step's T tokens need logits.

    ``tokens`` are their indices among the T, ascending per row; ``sampled_of_pairs`` gives, for
    each (row, sequence) to sample, its place in ``tokens``; ``prompt`` maps the number of a row
    that wants prompt logprobs to (its first place in ``tokens``, the tokens to be predicted).
    """

    def __init__(self, rows: list[Row]) -> None:
        self.tokens: list[int] = []
        self.sampled_of_pairs: list[int] = []
        self.prompt: dict[int, tuple[int, list[int]]] = {}
        begin = 0
        for r, row in enumerate(rows):
            count = len(row.token_ids)
            if row.params.prompt_logprobs is not None:
                # The token at position p predicts prompt[p + 1].
                targets = row.prompt[row.start + 1 : row.end + 1]
                if targets:
                    self.prompt[r] = (len(self.tokens), targets)
                    self.tokens.extend(range(begin, begin + len(targets)))
            if row.sample:
                last = begin + count - 1
                if not self.tokens or self.tokens[-1] != last:
                    self.tokens.append(last)
                self.sampled_of_pairs.extend([len(self.tokens) - 1] * len(row.sample))
            begin += count


def _row_output(row: Row, sampled: list[Sampled]) -> RowOutput:
    tokens = []
    for each in sampled:
        if each.error is not None:
            return RowOutput([], error=each.error)
        tokens.append(each.token_id)
    if row.params.logprobs is None or not sampled:
        return RowOutput(tokens)
    return RowOutput(tokens, [each.logprobs or [] for each in sampled])


def load_runner(config: EngineConfig) -> Runner:
    """Load the model, size and allocate the KV cache, log the ledger, warm the kernels up.

    Raises a LoadError of ``errors`` for whatever is wrong with options, files or architecture.
    Sets the number of threads of the process's tensor operations.
    """
    torch.set_num_threads(config.threads or available_cores())
    begin = time.monotonic()
    model = load_model(config)
    budget = config.max_num_batched_tokens or _BUDGET[model.device.type]
    added = _speed_up(config, model, budget)
    cache_dtype = (
        model.dtype
        if config.kv_cache_dtype == "auto"
        else resolve_dtype(config.kv_cache_dtype, model.dtype, model.device, "kv_cache_dtype")
    )
    ledger = plan_memory(
        config,
        model.layers,
        dtype=cache_dtype,
        device=model.device,
        weights=model.weight_bytes + added,
        activations=_activations(config, model, budget),
        available=available_memory(model.device),
        max_model_len=model.max_model_len,
    )
    try:
        caches = make_layer_caches(
            model.layers,
            ledger.num_blocks,
            config.block_size,
            cache_dtype,
            model.device,
            config.attention,
        )
    except (torch.OutOfMemoryError, MemoryError, OSError) as error:  # the allocators'
        raise ConfigError.of("kv_cache_bytes", ledger.cache, f"allocatable ({error})") from None
    info = _describe(model, caches, ledger, budget)
    runner = Runner(model, caches, info)
    _warm_up(runner)
    _log.info("%s", ledger)
    _log.info(
        "loaded a %s of %s parameters in %s on %s with %s attention, context %s, in %.1f s",
        model.config.model_type,
        f"{info.num_parameters:,}",
        info.dtype,
        info.device,
        info.attention,
        f"{info.max_model_len:,}",
        time.monotonic() - begin,
    )
    return runner


def _describe(
    model: LoadedModel, caches: list[LayerCache], ledger: Ledger, budget: int
) -> ModelInfo:
    """What the front must know."""
    return ModelInfo(
        vocab_size=model.vocab_size,
        max_model_len=model.max_model_len,
        num_blocks=ledger.num_blocks,
        block_size=ledger.block_size,
        eos_ids=model.eos_ids,
        dtype=str(model.dtype).removeprefix("torch."),
        device=str(model.device),
        attention="+".join(sorted({cache.attend.name for cache in caches})),
        num_parameters=model.num_parameters,
        max_num_batched_tokens=budget,
    )


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
    check_same(before, after)
    return added


def _activations(config: EngineConfig, model: LoadedModel, budget: int) -> int:
    """The estimate for the largest step, from the widths that the configuration states."""
    hf = model.config
    width = getattr(hf, "intermediate_size", None) or 4 * hf.hidden_size
    return estimate_activations(
        budget,
        hidden=hf.hidden_size,
        intermediate=width if isinstance(width, int) else max(width),  # some state one per layer
        vocab=model.vocab_size,
        logits_rows=config.max_num_seqs,
        itemsize=model.dtype.itemsize,
    )


def _warm_up(runner: Runner) -> None:
    """Run a chunk of a prompt and a decode, so that kernels are compiled and memory is touched
    before the first request. What this writes into blocks is overwritten before it is ever read."""
    info = runner.info
    slots = info.num_blocks * info.block_size
    count = min(16, info.max_num_batched_tokens, info.max_model_len - 1, slots - 1)
    tokens = [0] * count
    for start, ids in ((0, tokens), (count, [0])):
        if not ids:
            continue
        row = Row(
            key=0,
            index=0,
            token_ids=ids,
            start=start,
            block_table=list(range(math.ceil((start + len(ids)) / info.block_size))),
            sample=(0,),
            params=SamplingParams(temperature=0.0, seed=0),
            prompt=tokens or [0],
            output=[],
            stop_ids=frozenset(),
            bad_words_ids=[],
        )
        runner.execute(Batch(rows=[row]))
