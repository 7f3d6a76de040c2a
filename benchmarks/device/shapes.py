"""The model whose steps are timed: its shape, its counted bytes and operations, random weights.

``LLAMA_8B`` is the shape of Llama-3.1-8B. Weights are made on the device; nothing is read or
downloaded.
"""

from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel


@dataclass(frozen=True)
class Shape:
    """A Llama's widths. ``itemsize`` is that of weights and caches alike."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    intermediate: int
    vocab: int
    positions: int
    itemsize: int = 2

    @property
    def step_values(self) -> int:
        """Weights that every step reads: the layers' and the head's, not the embedding's."""
        attention = self.hidden * self.head_size * (2 * self.heads + 2 * self.kv_heads)
        layer = attention + 3 * self.hidden * self.intermediate + 2 * self.hidden
        return self.layers * layer + self.hidden + self.vocab * self.hidden

    @property
    def prompt_values(self) -> int:
        """Weights that each token of a prompt is multiplied with: the head sees the last alone."""
        return self.step_values - self.vocab * self.hidden

    @property
    def kv_bytes(self) -> int:
        """Of K and V, all layers, for one token."""
        return 2 * self.layers * self.kv_heads * self.head_size * self.itemsize

    def step_bytes(self, sequences: int, context: int) -> int:
        """Weights and K and V of ``sequences`` of ``context`` tokens, each read once."""
        return self.step_values * self.itemsize + sequences * context * self.kv_bytes

    def step_operations(self, sequences: int) -> int:
        """Multiplications and additions of the matrix products of a decode step."""
        return 2 * self.step_values * sequences

    def config(self) -> LlamaConfig:
        """For transformers; without an end of sequence, since random weights would find it."""
        return LlamaConfig(
            hidden_size=self.hidden,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head_size,
            intermediate_size=self.intermediate,
            vocab_size=self.vocab,
            max_position_embeddings=self.positions,
            rms_norm_eps=1e-5,
            rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
            tie_word_embeddings=False,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=None,
            dtype="bfloat16" if self.itemsize == 2 else "float32",
        )


LLAMA_8B = Shape(
    hidden=4096, layers=32, heads=32, kv_heads=8, head_size=128, intermediate=14336, vocab=128256,
    positions=131072,
)  # fmt: skip
TINY = Shape(
    hidden=64, layers=2, heads=4, kv_heads=2, head_size=16, intermediate=96, vocab=160,
    positions=256, itemsize=4,
)  # fmt: skip


def make_module(
    shape: Shape, device: torch.device, attention: str = "sdpa", seed: int = 0
) -> PreTrainedModel:
    """The module in eval mode, drawn on ``device`` as transformers initializes it."""
    torch.manual_seed(seed)
    config = shape.config()
    with device:
        module: Any = AutoModelForCausalLM.from_config(
            config, dtype=config.dtype, attn_implementation=attention
        )
    assert next(module.parameters()).device.type == device.type
    module.generation_config.eos_token_id = None
    return module.eval()
