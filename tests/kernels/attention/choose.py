"""The attention function that option ``attention`` stands for."""

from typing import Any

import torch
from jitney.engine.assemble import accelerator_for
from jitney.execution.acceleration import attention_for
from jitney.execution.attention import AttentionShape
from jitney.execution.interface import AttentionFunction, LayerSpec
from jitney.read_config import make_config

CPU = torch.device("cpu")


def choose(
    name: str,
    device: torch.device = CPU,
    dtype: torch.dtype = torch.float32,
    head_size: int = 64,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    model_dtype: torch.dtype = torch.float32,
    **options: object,
) -> AttentionFunction:
    """As a load chooses it for one layer."""
    config = make_config({"model": "m", "attention": name, **options})
    shape = AttentionShape(
        device, dtype, model_dtype, head_size, num_heads, num_kv_heads, config.batch_invariant
    )
    return attention_for(name, shape, accelerator_for(config, device))


def for_layers(
    name: str, layers: list[LayerSpec], dtype: torch.dtype, device: torch.device, **more: Any
) -> list[AttentionFunction]:
    """One for each of a model's layers."""
    return [
        choose(name, device, dtype, x.head_size, x.num_heads, x.num_kv_heads, **more)
        for x in layers
    ]
