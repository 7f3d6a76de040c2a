"""What loading a runner takes, whichever runner it is: options that depend on the device, the
estimate of a step's memory, what the front is told, the first steps. Called by the ``load_runner``
of ``runner`` and by ``gpu.load``.
"""

import logging
import math
import time
from typing import Protocol

import torch

from jitney.config import EngineConfig
from jitney.errors import ConfigError
from jitney.execution.interface import LayerCache
from jitney.execution.memory import (
    Ledger,
    estimate_activations,
    make_layer_caches,
    select_attention,
)
from jitney.execution.models import LoadedModel, resolve_dtype
from jitney.request import Batch, ModelInfo, Row, StepOutput
from jitney.sampling_params import SamplingParams

_log = logging.getLogger(__name__)

_GREEDY = SamplingParams(temperature=0.0, seed=0)
FLOAT8 = "float8_e4m3"


class Executing(Protocol):
    """A runner, as far as its first steps go."""

    info: ModelInfo

    def execute(self, batch: Batch) -> StepOutput:
        """Compute one step."""


def enter_device(device: torch.device) -> None:
    """Make a GPU the calling thread's: torch's own operations go where their tensors are, kernels
    of others to the thread's device."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def check_gpu_options(config: EngineConfig) -> None:
    """Refuse options that only the GPU's kernels give a meaning, where those do not run. Raises
    ConfigError naming the first."""
    refused: dict[str, tuple[object, object]] = {
        "batch_invariant": (config.batch_invariant, False),
        "compile": (config.compile, False),
        "cuda_graph_sizes": (config.cuda_graph_sizes, None),
    }
    for key, (value, allowed) in refused.items():
        if value != allowed:
            raise ConfigError.of(key, value, f"{allowed} without the attention kernels of a GPU")
    if config.cuda_graphs == "load":
        raise ConfigError.of(
            "cuda_graphs", "load", "lazy or never without the attention kernels of a GPU"
        )
    if config.kv_cache_dtype == FLOAT8:
        raise ConfigError.of(
            "kv_cache_dtype", FLOAT8, "another one without the attention kernels of a GPU"
        )


def cache_dtype(config: EngineConfig, model: LoadedModel) -> torch.dtype:
    """The dtype of option ``kv_cache_dtype``. Raises ConfigError if the device has no such."""
    if config.kv_cache_dtype == "auto":
        return model.dtype
    if config.kv_cache_dtype == FLOAT8:
        return torch.float8_e4m3fn
    return resolve_dtype(config.kv_cache_dtype, model.dtype, model.device, "kv_cache_dtype")


def step_activations(
    config: EngineConfig, model: LoadedModel, budget: int, logits_rows: int | None = None
) -> int:
    """The estimate for the largest step, from the widths that the configuration states."""
    hf = model.config
    width = getattr(hf, "intermediate_size", None) or 4 * hf.hidden_size
    return estimate_activations(
        budget,
        hidden=hf.hidden_size,
        intermediate=width if isinstance(width, int) else max(width),  # some state one per layer
        vocab=model.vocab_size,
        logits_rows=logits_rows or config.max_num_seqs,
        itemsize=model.dtype.itemsize,
    )


def runs_gpu_kernels(config: EngineConfig, model: LoadedModel) -> bool:
    """Whether all layers attend through the GPU's own kernels, which plan without looking at the
    device. Raises ConfigError if they were asked for by name and cannot run."""
    if config.attention not in ("auto", "gpu") or (
        model.device.type == "cpu" and config.attention == "auto"
    ):
        return False
    functions = select_attention(
        model.layers, cache_dtype(config, model), model.device, config.attention
    )
    return all(hasattr(attend, "plan") for attend in functions)


def allocate_caches(
    config: EngineConfig, model: LoadedModel, ledger: Ledger, dtype: torch.dtype
) -> list[LayerCache]:
    """The KV cache. Raises ConfigError if the memory cannot be had."""
    try:
        return make_layer_caches(
            model.layers,
            ledger.num_blocks,
            config.block_size,
            dtype,
            model.device,
            config.attention,
            batch_invariant=config.batch_invariant,
        )
    except (torch.OutOfMemoryError, MemoryError, OSError) as error:  # the allocators'
        raise ConfigError.of("kv_cache_bytes", ledger.cache, f"allocatable ({error})") from None


def describe(
    model: LoadedModel,
    caches: list[LayerCache],
    ledger: Ledger,
    budget: int,
    *,
    overlap: bool = False,
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
        overlap=overlap,
    )


def dummy_row(tokens: int, start: int, block_table: list[int], params: SamplingParams) -> Row:
    """A row that computes some tokens of a prompt that ends with them, and samples."""
    return Row(
        key=0,
        index=0,
        token_ids=[0] * tokens,
        start=start,
        block_table=block_table,
        sample=(0,),
        params=params,
        prompt=[0] * (start + tokens),
        output=[],
        stop_ids=frozenset(),
        bad_words_ids=[],
    )


def warm_up(runner: Executing) -> None:
    """Run a chunk of a prompt and a decode, so that kernels are compiled and memory is touched
    before the first request. What this writes into blocks is overwritten before it is ever read."""
    info = runner.info
    slots = info.num_blocks * info.block_size
    count = min(16, info.max_num_batched_tokens, info.max_model_len - 1, slots - 1)
    for start, tokens in ((0, count), (count, 1)):
        if tokens:
            blocks = math.ceil((start + tokens) / info.block_size)
            row = dummy_row(tokens, start, list(range(blocks)), _GREEDY)
            runner.execute(Batch(rows=[row]))


def log_loaded(model: LoadedModel, info: ModelInfo, ledger: Ledger, begin: float) -> None:
    """Say where the memory goes and what is served; ``begin`` is when the load began."""
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
