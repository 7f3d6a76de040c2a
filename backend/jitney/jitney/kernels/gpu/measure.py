"""How much memory a step takes, by making the largest ones, once, while a runner loads.

The steps run over a cache of one block, which every entry of their tables names: contexts can be as
long as the model's although nothing holds them yet. What they compute means nothing.
"""

import math

import msgspec
import torch

from jitney.batch import Batch, Row
from jitney.config import EngineConfig
from jitney.execution.interface import LayerCache, LoadedModel
from jitney.execution.low_rank import idle_factors
from jitney.execution.memory import StepMemory
from jitney.execution.probe import probe_row
from jitney.execution.runner import TorchRunner
from jitney.kernels.gpu.graphs import padded_sizes
from jitney.messages import ModelInfo
from jitney.sampling_params import SamplingParams

# One decode row has the longest context. The others have this one, so that measuring takes little
# time.
_SHORT_CONTEXT = 64
# Memory of the driver for a graph of some hundred kernels.
_GRAPH_BYTES = 2 << 20


def measure_steps(
    model: LoadedModel, caches: list[LayerCache], info: ModelInfo, config: EngineConfig
) -> StepMemory:
    """Measure on a CUDA device. ``caches`` have one block, as ``info.num_blocks`` says."""
    runner = TorchRunner(model, caches, info)
    adapter = None
    if model.sites:
        adapter = runner.make_adapter("", idle_factors(model.sites, config.max_adapter_rank))
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(model.device)
    torch.cuda.reset_peak_memory_stats(model.device)
    rows = min(config.max_num_seqs, info.max_num_batched_tokens)
    greedy = SamplingParams(temperature=0.0, seed=0)
    runner.execute(Batch(decode_rows(info, rows, greedy)))
    decode = torch.cuda.max_memory_reserved(model.device) - before
    for batch in largest_batches(info, config):
        for row in batch.rows:
            row.adapter = adapter
        runner.execute(batch)
    # Reserved, not allocated: gaps between tensors count.
    activations = torch.cuda.max_memory_reserved(model.device) - before
    # Free the adapter, which these hold: its memory is counted elsewhere.
    del adapter, batch, row
    runner.close()
    return StepMemory(activations, _graph_bytes(decode, config, info))


def _graph_bytes(decode: int, config: EngineConfig, info: ModelInfo) -> int:
    """What all graphs take. They share memory: about ``decode``, what the largest decode step
    takes."""
    sizes = padded_sizes(config, info)
    if not sizes:
        return 0
    # Captured in any order, a larger graph may not fit into what the smaller ones left.
    times = 1 if config.cuda_graphs == "load" else 2
    return times * decode + len(sizes) * _GRAPH_BYTES


def largest_batches(info: ModelInfo, config: EngineConfig) -> list[Batch]:
    """The steps that need the most memory: one of as many prompt tokens as the budget allows, all
    with logprobs, and two of as many decodes as fit, with the sampling parameters that take most.
    """
    prompts = SamplingParams(temperature=0.0, seed=0, prompt_logprobs=1)
    rows: list[Row] = []
    left = info.max_num_batched_tokens
    while left and len(rows) < config.max_num_seqs:
        count = min(left, max(1, info.max_model_len - 1))
        rows.append(probe_row([0] * count, 0, count, _blocks(info, count), prompts))
        left -= count
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
        Batch(rows),
        Batch(decode_rows(info, most, sampled)),
        Batch(decode_rows(info, most, plain)),
    ]


def decode_rows(info: ModelInfo, count: int, params: SamplingParams) -> list[Row]:
    """A decode step of ``count`` rows, of which one has the longest context there can be."""
    longest = info.max_model_len
    contexts = [longest, *[min(longest, _SHORT_CONTEXT)] * (count - 1)]
    return [probe_row([0] * n, n - 1, 1, _blocks(info, n), params) for n in contexts]


def _blocks(info: ModelInfo, context: int) -> list[int]:
    return [0] * math.ceil(context / info.block_size)
