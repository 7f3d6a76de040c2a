"""The ways in which a model's tokens are compared with those of ``generate``.

Each way is a load of its own with small options, and some prompts that it makes hard: so many rows
that they share a step, chunks, caches that are too small.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from jitney.execution.position_offset import position_offset
from jitney.llm import LLM

from benchmarks.architectures.shapes import VOCAB_SIZE

NEW_TOKENS = 24
PROMPT_LENGTHS = (5, 17, 33, 70)
_BASE: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "threads": 1,
    "kv_cache_bytes": 8 << 20,
    "max_num_seqs": 8,
}
_SPECIAL_IDS = 5  # the first ids of the vocabulary: of padding, of beginning and end

Tokens = list[list[int]]


@dataclass(frozen=True)
class Way:
    """One way to run the prompts."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    grows: bool = False
    """Whether the prompts run once more with what was generated, so that prefixes are found."""


WAYS = (
    Way("batch", grows=True),
    Way("chunks", {"max_num_batched_tokens": 16}),
    Way("preempted", {"kv_cache_bytes": None, "num_tokens": 144}),
    Way("drafts", {"speculation": {"drafter": "ngram", "ngram_min": 1}}),
    Way("plain torch", {"attention": "reference", "fuse": False, "prepack": False}),
    Way("overlap off", {"overlap": False}),
)


def make_prompts() -> Tokens:
    """The same prompts for each type."""
    generator = torch.Generator().manual_seed(5)
    return [
        torch.randint(_SPECIAL_IDS, VOCAB_SIZE, (length,), generator=generator).tolist()
        for length in PROMPT_LENGTHS
    ]


def generated(folder: Path, prompts: Tokens) -> Tokens:
    """The greedy tokens of transformers itself, each prompt alone."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32
    )
    model.eval()
    if position_offset(model.config) > 0:
        # ``generate`` gives these models positions from 0, and not those that they count.
        return [_count_alone(model, prompt) for prompt in prompts]
    # A processor of `generate`, which ends every output of a Bart by itself.
    model.generation_config.forced_eos_token_id = None
    found = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            output = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=NEW_TOKENS,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
        found.append(output[0, len(prompt) :].tolist())
    return found


def _count_alone(model: transformers.PreTrainedModel, prompt: list[int]) -> list[int]:
    """The greedy tokens of a model that counts the positions of the whole sequence each time."""
    ids = list(prompt)
    for _ in range(NEW_TOKENS):
        with torch.inference_mode():
            logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits
        ids.append(int(logits[0, -1].argmax()))
    return ids[len(prompt) :]


def run(folder: Path, way: Way, prompts: Tokens) -> "Run":
    """The tokens of all prompts, which run at once."""
    options = {**_BASE, **way.options}
    num_tokens = options.pop("num_tokens", None)
    if num_tokens is not None:
        options["kv_cache_bytes"] = _bytes_for(folder, num_tokens)
    with LLM(folder, **options) as llm:
        tokens = _generate(llm, prompts, NEW_TOKENS)
        again = None
        if way.grows:
            half = NEW_TOKENS // 2
            grown = [prompt + made[:half] for prompt, made in zip(prompts, tokens, strict=True)]
            rest = _generate(llm, grown, half)
            again = [made[:half] + later for made, later in zip(tokens, rest, strict=True)]
        cache = getattr(llm.info, "cache", "paged")
    return Run(tokens=tokens, again=again, cache=cache)


@dataclass(frozen=True)
class Run:
    """What a way gave."""

    tokens: Tokens
    again: Tokens | None
    """The tokens once more, the second half from a prompt that had grown; None if not run."""
    cache: str
    """The kind of the model's cache."""


def _generate(llm: LLM, prompts: Tokens, count: int) -> Tokens:
    params = {"temperature": 0.0, "max_tokens": count, "ignore_eos": True}
    results = llm.generate(prompts, params, progress=False)
    return [result.ids for result in results]


def _bytes_for(folder: Path, num_tokens: int) -> int:
    """The bytes of a cache of so many tokens. If a model keeps states alone, whatever the tokens:
    those of two sequences."""
    with LLM(folder, **_BASE) as llm:
        info = llm.info
    if info.cache == "state" and info.kv_cache_bytes < _BASE["kv_cache_bytes"] // 2:
        return 2 * info.kv_cache_bytes // info.num_slots
    of_token = _BASE["kv_cache_bytes"] / (info.num_blocks * info.block_size)
    return int(of_token * num_tokens)
