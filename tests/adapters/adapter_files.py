"""Adapters of a tiny Llama, written without PEFT."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

LAYERS = {
    "self_attn.q_proj": (64, 64), "self_attn.v_proj": (32, 64), "self_attn.o_proj": (64, 64),
    "mlp.up_proj": (96, 64), "mlp.down_proj": (64, 96),
}  # fmt: skip
"""Of ``tests.tiny_models``: outputs and inputs."""


def write_adapter(folder: Path, rank: int) -> None:
    """An adapter that changes what the model says; each rank leaves another layer out."""
    folder.mkdir(parents=True)
    drawn = torch.Generator().manual_seed(rank)
    tensors = {}
    for at, (layer, (outputs, inputs)) in enumerate(LAYERS.items()):
        if at == rank % len(LAYERS):
            continue
        for number in range(2):
            name = f"base_model.model.model.layers.{number}.{layer}"
            tensors[f"{name}.lora_A.weight"] = torch.randn(rank, inputs, generator=drawn) / 8
            tensors[f"{name}.lora_B.weight"] = torch.randn(outputs, rank, generator=drawn) / 4
    save_file(tensors, folder / "adapter_model.safetensors")
    said = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank}
    (folder / "adapter_config.json").write_text(json.dumps(said), encoding="utf-8")
