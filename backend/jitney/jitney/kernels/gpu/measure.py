"""How much memory a step takes: the largest steps are run once, while a runner loads.

They run over a cache of a single block, which is every entry of their block tables. So contexts can
be as long as the model allows, although there is no cache for them yet. What the steps compute
means nothing.

Called by ``gpu_accelerator``.
"""

import math

import msgspec
import torch

from jitney.batch import Batch, Row
from jitney.config import EngineConfig
from jitney.execution.interface import LayerCache, LoadedModel
from jitney.execution.low_rank import zero_factors
from jitney.execution.memory import StepMemory
from jitney.execution.probe import probe_row
from jitney.execution.runner import TorchRunner
from jitney.kernels.gpu.graphs import padded_sizes
from jitney.messages import ModelInfo
from jitney.sampling_params import SamplingParams

_SHORT_CONTEXT = 64
"""The context of all rows of a decode step but one, so that measuring takes little time."""
_GRAPH_BYTES = 2 << 20
"""What the driver takes for a graph of some hundred kernels."""


def measure_steps(
    model: LoadedModel, caches: list[LayerCache], info: ModelInfo, config: EngineConfig
) -> StepMemory:
    """Measure on a CUDA device. ``caches`` have one block, as ``info.num_blocks`` says."""
    runner = TorchRunner(model, caches, info)
    # If requests may have adapters, every row gets one that adds nothing: its products take memory.
    adapter = None
    if model.sites:
        adapter = runner.make_adapter("", zero_factors(model.sites, config.max_adapter_rank))
    torch.cuda.empty_cache()
    allocated_before = torch.cuda.memory_allocated(model.device)
    torch.cuda.reset_peak_memory_stats(model.device)
    # First a step as graphs have it: decodes without adapters.
    rows = min(config.max_num_seqs, info.max_num_batched_tokens)
    greedy = SamplingParams(temperature=0.0, seed=0)
    runner.execute(Batch(decode_rows(info, rows, greedy)))
    # What is reserved, not what is allocated, here and below: gaps between tensors count.
    decode_bytes = torch.cuda.max_memory_reserved(model.device) - allocated_before
    for batch in largest_batches(info, config):
        for row in batch.rows:
            row.adapter = adapter
        runner.execute(batch)
    activations = torch.cuda.max_memory_reserved(model.device) - allocated_before
    # Free the adapter, whose memory is counted elsewhere. The last batch and its last row hold it.
    del adapter, batch, row
    runner.close()
    return StepMemory(activations, _graph_bytes(decode_bytes, config, info))


def _graph_bytes(decode_bytes: int, config: EngineConfig, info: ModelInfo) -> int:
    """What all graphs take. ``decode_bytes`` is what the largest decode step takes."""
    sizes = padded_sizes(config, info)
    if not sizes:
        return 0
    # Graphs share memory. If all are captured at the load, the largest comes first, and the others
    # fit into its memory. If they are captured in any order, a larger one may not fit into what the
    # smaller ones left.
    shared_bytes = decode_bytes if config.cuda_graphs == "load" else 2 * decode_bytes
    return shared_bytes + len(sizes) * _GRAPH_BYTES


def largest_batches(info: ModelInfo, config: EngineConfig) -> list[Batch]:
    """The steps that need the most memory: one of as many prompt tokens as the budget allows, all
    with logprobs, and two of as many decodes as fit, with the sampling parameters that take most.
    """
    # Prompts as long as can be, until the budget is used up.
    with_logprobs = SamplingParams(temperature=0.0, seed=0, prompt_logprobs=1)
    prompts: list[Row] = []
    left = info.max_num_batched_tokens
    while left and len(prompts) < config.max_num_seqs:
        count = min(left, max(1, info.max_model_len - 1))
        row = probe_row(
            prompt=[0] * count,
            start=0,
            count=count,
            block_table=_blocks(info, count),
            params=with_logprobs,
        )
        prompts.append(row)
        left -= count
    # Two steps of decodes, as it depends on the model which one takes more: one with a penalty and
    # logprobs, and one that has a top_p without a top_k and so sorts all logits.
    sampled = SamplingParams(
        temperature=1.0,
        top_p=0.9,
        top_k=min(50, info.vocab_size),
        min_p=0.01,
        repetition_penalty=1.1,
        logprobs=config.max_logprobs,
        seed=0,
    )
    plain = msgspec.structs.replace(sampled, repetition_penalty=1.0, logprobs=None, top_k=0)
    most = min(config.most_samples, info.max_num_batched_tokens)
    return [
        Batch(prompts),
        Batch(decode_rows(info, most, sampled)),
        Batch(decode_rows(info, most, plain)),
    ]


def decode_rows(info: ModelInfo, count: int, params: SamplingParams) -> list[Row]:
    """A decode step of ``count`` rows, of which one has the longest context there can be."""
    longest = info.max_model_len
    short = min(longest, _SHORT_CONTEXT)
    rows = []
    for context in [longest, *[short] * (count - 1)]:
        row = probe_row(
            prompt=[0] * context,
            start=context - 1,
            count=1,
            block_table=_blocks(info, context),
            params=params,
        )
        rows.append(row)
    return rows


def _blocks(info: ModelInfo, context: int) -> list[int]:
    """A block table for so many tokens: block 0 again and again, as there is no other."""
    return [0] * math.ceil(context / info.block_size)
