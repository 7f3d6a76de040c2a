"""Adapters as PEFT makes and saves them, and what PEFT gives with them."""

from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model

from tests.execution.generate import eager, generate

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def make_adapter(checkpoint: Path, folder: Path, *, seed: int = 0, **fields: Any) -> Path:
    """Write an adapter that changes what the model says. ``fields`` are LoraConfig's."""
    config = LoraConfig(**{"r": 8, "target_modules": ["q_proj", "v_proj"], **fields})
    model = get_peft_model(eager(checkpoint), config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.25 * torch.randn(parameter.shape, generator=generator))
    model.save_pretrained(folder)
    return folder


def peft_tokens(
    checkpoint: Path, adapter: Path | None, prompts: list[list[int]], count: int
) -> list[list[int]]:
    """The greedy tokens of PEFT for each prompt; without an adapter, of the model itself."""
    model: Any = eager(checkpoint)
    if adapter is not None:
        model = PeftModel.from_pretrained(model, adapter)
    model.eval()
    return [generate(model, prompt, count)[0] for prompt in prompts]
