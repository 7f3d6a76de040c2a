"""The second half of a load, of a model with opaque caches: the account of its memory, and its
runner. Called by ``load``, in place of speed-up, allocation and the paged runner.
"""

import msgspec

from jitney.config import EngineConfig
from jitney.execution import machine, memory
from jitney.execution.first_steps import first_steps
from jitney.execution.interface import LoadedModel
from jitney.execution.opaque_runner import OpaqueRunner
from jitney.messages import ModelInfo


def plan_opaque(config: EngineConfig, model: LoadedModel, info: ModelInfo) -> memory.Ledger:
    """Size slots and blocks. Nothing is allocated: cache objects grow as they are used, and blocks
    are the account of it. Raises ConfigError if the memory is too little."""
    opaque = model.opaque
    traits = model.opaque_traits
    assert opaque is not None
    assert traits is not None
    # A prompt that is not cut may be as long as the context.
    most_tokens = info.max_num_batched_tokens
    if traits.chunking == "whole":
        most_tokens = max(most_tokens, model.max_model_len)
    logits_rows = config.max_num_seqs
    if not opaque.takes_num_logits:
        logits_rows = most_tokens
    needs = memory.Needs(
        device=model.device,
        max_model_len=model.max_model_len,
        weight_bytes=model.weight_bytes,
        block_bytes=traits.token_bytes * config.block_size,
        steps=memory.estimate_steps(model, most_tokens, logits_rows),
        adapter_bytes=memory.resident_adapters_bytes(config, model, copied_rank=0),
        slot_bytes=traits.fixed_bytes,
        most_slots=min(config.max_num_seqs, info.max_num_batched_tokens),
    )
    return memory.plan_memory(config, needs, machine.available_memory(model.device))


def make_opaque_runner(model: LoadedModel, info: ModelInfo, ledger: memory.Ledger) -> OpaqueRunner:
    """The runner, warmed up by its first steps."""
    traits = model.opaque_traits
    assert traits is not None
    info = msgspec.structs.replace(
        info,
        num_blocks=ledger.num_blocks,
        kv_cache_bytes=ledger.cache,
        attention="transformers",
        cache="opaque",
        num_slots=ledger.num_slots,
        chunking=traits.chunking,
        slowdown=traits.slowdown,
    )
    runner = OpaqueRunner(model, info)
    runner.warm_up(first_steps(info, propose=0))
    return runner
