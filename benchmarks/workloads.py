"""The fixed workloads and the fixed model on which engines are compared.

Owns the definitions of W1, W2 and W3 and of the random-weight models ``m100`` and ``m500``: every
benchmark and every engine beside ours takes them from here, so that figures of different engines
are of the same prompts, the same output lengths and the same weights. Prompts are token ids; there
is no tokenizer.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

VOCAB_SIZE = 32000
"""Of ``m100``."""
MAX_NUM_SEQS = 32
MAX_NUM_BATCHED_TOKENS = 512


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests that all arrive at t = 0; greedy, the end of sequence ignored.

    ``output_lengths[i]`` tokens are made after ``prompts[i]``. ``figure`` names what is divided by
    the seconds it took: "output" (tokens made), "decode" (tokens made after the first, over the
    time after the first) or "prompt" (tokens read until the first one is made).
    """

    name: str
    prompts: list[list[int]]
    output_lengths: list[int]
    figure: str

    @property
    def prompt_tokens(self) -> int:
        """Sum over all prompts."""
        return sum(len(prompt) for prompt in self.prompts)

    @property
    def output_tokens(self) -> int:
        """Sum over all outputs."""
        return sum(self.output_lengths)

    @property
    def max_length(self) -> int:
        """Longest prompt plus output, in tokens."""
        return max(len(p) + n for p, n in zip(self.prompts, self.output_lengths, strict=True))

    def head(self, count: int) -> "Workload":
        """The first ``count`` requests alone, for a quick look or a slow engine."""
        return Workload(
            f"{self.name}/{count}", self.prompts[:count], self.output_lengths[:count], self.figure
        )


def w1(vocab_size: int = VOCAB_SIZE) -> Workload:
    """64 requests of mixed lengths: 18,718 prompt and 8,718 output tokens."""
    random = np.random.RandomState(1234)
    prompt_lengths = random.randint(32, 513, 64)
    output_lengths = random.randint(16, 257, 64)
    prompts = [random.randint(10, vocab_size - 10, length).tolist() for length in prompt_lengths]
    return Workload("W1", prompts, output_lengths.tolist(), "output")


def w2(vocab_size: int = VOCAB_SIZE) -> Workload:
    """One stream: 256 tokens in, 128 out; the decode rate is the figure."""
    random = np.random.RandomState(1235)  # another seed: no prefix in common with W1 or W3
    return Workload("W2", [random.randint(10, vocab_size - 10, 256).tolist()], [128], "decode")


def w3(vocab_size: int = VOCAB_SIZE) -> Workload:
    """One prompt of 2,048 tokens and its first token; the prefill rate is the figure."""
    random = np.random.RandomState(1236)
    return Workload("W3", [random.randint(10, vocab_size - 10, 2048).tolist()], [1], "prompt")


def warm_up(vocab_size: int = VOCAB_SIZE) -> Workload:
    """A few requests that bring every engine's kernels and threads to life; not measured."""
    random = np.random.RandomState(1)
    prompts = [random.randint(10, vocab_size - 10, length).tolist() for length in (300, 40, 40)]
    return Workload("warm-up", prompts, [4, 12, 12], "output")


WORKLOADS = {"W1": w1, "W2": w2, "W3": w3}


def save_m100(folder: Path) -> Path:
    """Write the checkpoint ``m100`` (bf16, random weights of seed 0) into ``folder``.

    A Llama of 102 M parameters with grouped queries and a tied head. Does nothing if it is there.
    """
    if not (folder / "config.json").exists():
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            hidden_size=768,
            num_hidden_layers=12,
            num_attention_heads=12,
            num_key_value_heads=4,
            intermediate_size=2048,
            vocab_size=VOCAB_SIZE,
            tie_word_embeddings=True,
            max_position_embeddings=4096,
        )
        _save(LlamaForCausalLM, config, folder)
    return folder


def save_m500(folder: Path) -> Path:
    """Write the checkpoint ``m500`` (bf16, random weights of seed 0) into ``folder``.

    The shape of Qwen2 with 494 M parameters: 136 M of them in a tied embedding of 151,936 tokens,
    seven query heads for each KV head, biases of query, key and value. Does nothing if it is there.
    """
    if not (folder / "config.json").exists():
        from transformers import Qwen2Config, Qwen2ForCausalLM

        config = Qwen2Config(
            hidden_size=896,
            num_hidden_layers=24,
            num_attention_heads=14,
            num_key_value_heads=2,
            intermediate_size=4864,
            vocab_size=151_936,
            tie_word_embeddings=True,
            max_position_embeddings=4096,
        )
        _save(Qwen2ForCausalLM, config, folder)
    return folder


def _save(model_class: Any, config: Any, folder: Path) -> None:
    import torch

    torch.manual_seed(0)
    model_class(config).to(torch.bfloat16).save_pretrained(folder)


MODELS = {"m100": save_m100, "m500": save_m500}
