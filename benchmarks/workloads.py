"""The fixed workloads and the fixed models on which engines are compared.

Owns the definitions of W1 to W7 and of the random-weight models ``m100``, ``m100_32k`` and
``m500``: every benchmark and every engine beside ours takes them from here, so that figures of
different engines are of the same prompts, the same output lengths and the same weights. Prompts are
token ids; there is no tokenizer.

W1, W2 and W3 are small. W4 to W7 show how cost grows: with a prompt, with the contexts of decodes,
with the number of sequences, and with a prefix that all share.
"""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

VOCAB_SIZE = 32000
"""Of ``m100``."""
MAX_NUM_SEQS = 32
MAX_NUM_BATCHED_TOKENS = 512


@dataclass(frozen=True, slots=True)
class Bounds:
    """What an engine is loaded with. Everything else is its default."""

    max_num_seqs: int = MAX_NUM_SEQS
    max_num_batched_tokens: int = MAX_NUM_BATCHED_TOKENS
    cache_gib: int = 1
    prefix_caching: bool | None = None
    """None: each engine's default, or off where the prompts would not be read again."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests that all arrive at t = 0; greedy, the end of sequence ignored.

    ``output_lengths[i]`` tokens are made after ``prompts[i]``. ``figure`` names what is divided by
    the seconds it took:

    - "output": tokens made.
    - "decode": tokens made once every request has its first one, over the time since then.
    - "prompt": tokens read until the first one is made.
    """

    name: str
    prompts: list[list[int]]
    output_lengths: list[int]
    figure: str
    asked_before: list[list[int]] = field(default_factory=list)
    """Prompts that are asked for one token each before the clock runs."""

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
        return replace(
            self,
            name=f"{self.name}/{count}",
            prompts=self.prompts[:count],
            output_lengths=self.output_lengths[:count],
        )

    def before(self) -> "Workload | None":
        """What is asked before the clock runs. None: nothing is."""
        if not self.asked_before:
            return None
        lengths = [1] * len(self.asked_before)
        return Workload(f"before {self.name}", self.asked_before, lengths, "output")


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


def w4(vocab_size: int = VOCAB_SIZE) -> Workload:
    """One prompt of 16,384 tokens and its first token; the prefill rate is the figure."""
    random = np.random.RandomState(1237)
    return Workload("W4", [random.randint(10, vocab_size - 10, 16_384).tolist()], [1], "prompt")


def w5(vocab_size: int = VOCAB_SIZE) -> Workload:
    """Four streams: 8,192 tokens in, 256 out each; the decode rate is the figure."""
    random = np.random.RandomState(1238)
    prompts = [random.randint(10, vocab_size - 10, 8192).tolist() for _ in range(4)]
    return Workload("W5", prompts, [256] * 4, "decode")


def w6(vocab_size: int = VOCAB_SIZE) -> Workload:
    """256 requests at once: 64 tokens in, 64 out each."""
    random = np.random.RandomState(1239)
    prompts = [random.randint(10, vocab_size - 10, 64).tolist() for _ in range(256)]
    return Workload("W6", prompts, [64] * 256, "output")


def w7(vocab_size: int = VOCAB_SIZE) -> Workload:
    """64 requests that share a prefix of 2,048 tokens, which was asked once before: 32 more tokens
    in and 32 out each."""
    random = np.random.RandomState(1240)
    prefix = random.randint(10, vocab_size - 10, 2048).tolist()
    prompts = [prefix + random.randint(10, vocab_size - 10, 32).tolist() for _ in range(64)]
    return Workload("W7", prompts, [32] * 64, "output", asked_before=[prefix])


def warm_up(vocab_size: int = VOCAB_SIZE) -> Workload:
    """A few requests that bring every engine's kernels and threads to life; not measured."""
    random = np.random.RandomState(1)
    prompts = [random.randint(10, vocab_size - 10, length).tolist() for length in (300, 40, 40)]
    return Workload("warm-up", prompts, [4, 12, 12], "output")


WORKLOADS = {"W1": w1, "W2": w2, "W3": w3, "W4": w4, "W5": w5, "W6": w6, "W7": w7}
_LONG = Bounds(cache_gib=2, prefix_caching=False)
_BOUNDS = {
    "W4": _LONG,
    "W5": _LONG,
    "W6": replace(_LONG, max_num_seqs=256, max_num_batched_tokens=1024),
    "W7": replace(_LONG, prefix_caching=True),
}


def bounds_of(workload: str) -> Bounds:
    """What an engine is loaded with for this workload."""
    return _BOUNDS.get(workload, Bounds())


def save_m100(folder: Path) -> Path:
    """Write the checkpoint ``m100`` (bf16, random weights of seed 0) into ``folder``.

    A Llama of 102 M parameters with grouped queries and a tied head. Does nothing if it is there.
    """
    return _save_llama(folder, max_position_embeddings=4096)


def save_m100_32k(folder: Path) -> Path:
    """The same with 32,768 positions in place of 4,096. The weights are equal."""
    return _save_llama(folder, max_position_embeddings=32_768)


def _save_llama(folder: Path, max_position_embeddings: int) -> Path:
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
            max_position_embeddings=max_position_embeddings,
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


MODELS = {"m100": save_m100, "m100_32k": save_m100_32k, "m500": save_m500}
