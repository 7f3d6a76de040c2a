"""Requests with adapters get PEFT's tokens, alone and beside others."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from jitney.llm import LLM
from jitney.sampling_params import SamplingParams

from tests.adapters.peft_adapters import ALL, make_adapter, peft_tokens
from tests.execution.generate import make_prompts
from tests.tiny_models import make_checkpoint

COUNT = 12
PROMPTS = make_prompts(9, 21, 5, 40, 13, 21)
NAMES = ["few", None, "all", "root", "all", "few"]
"""Of the adapters that the prompts ask for."""
PLAIN = {"attention": "reference", "prepack": False, "fuse": False}
UNFUSED = {"fuse": False}

# What its layers are called, and a pattern for some of them.
TARGETS = {
    "llama": (ALL, {"layers.1.self_attn.q_proj": 3}),
    "gemma2": (ALL, {"down_proj": 5}),
    "phi3": (("qkv_proj", "o_proj", "gate_up_proj", "down_proj"), {"qkv_proj": 12}),
    "gpt2": (("c_attn", "c_fc"), {}),
    "qwen3_moe": (("q_proj", "o_proj"), {}),
}


def greedy(name: str | None) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=COUNT, ignore_eos=True, lora_name=name)


class Expected:
    """A checkpoint with adapters of several ranks, scales and targets, and what PEFT gives."""

    def __init__(self, folder: Path, architecture: str) -> None:
        self.checkpoint = make_checkpoint(folder / "m", architecture, tokenizer=True)
        self.adapters = folder / "adapters"
        targets, pattern = TARGETS[architecture]
        kinds: dict[str, dict[str, Any]] = {
            "few": {"r": 4, "lora_alpha": 8, "target_modules": [targets[0]]},
            "all": {"r": 16, "lora_alpha": 8, "target_modules": list(targets)},
            "root": {
                "r": 7,
                "lora_alpha": 10,
                "use_rslora": True,
                "target_modules": list(targets),
                "rank_pattern": pattern,
                "alpha_pattern": {targets[-1]: 6},
            },
        }
        self.plain = peft_tokens(self.checkpoint, None, PROMPTS, COUNT)
        by_name: dict[str | None, list[list[int]]] = {None: self.plain}
        for seed, (name, fields) in enumerate(kinds.items()):
            made = make_adapter(self.checkpoint, self.adapters / name, seed=seed, **fields)
            by_name[name] = peft_tokens(self.checkpoint, made, PROMPTS, COUNT)
        self.right = [by_name[name][index] for index, name in enumerate(NAMES)]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Expected]:
    """By architecture, each made once."""

    @cache
    def make(architecture: str) -> Expected:
        return Expected(tmp_path_factory.mktemp(architecture), architecture)

    return make


@pytest.mark.parametrize(
    ("architecture", "options"),
    [
        ("llama", PLAIN),
        pytest.param("llama", UNFUSED, marks=pytest.mark.slow),
        # By kernels: tests/kernels/cpu/test_adapters_in_program.py holds them against plain torch.
        pytest.param("llama", {}, marks=pytest.mark.slow),
        *(pytest.param(name, {}, marks=pytest.mark.slow) for name in TARGETS if name != "llama"),
    ],
)
def test_a_batch_of_adapters_gives_the_tokens_of_peft(
    expected: Callable[[str], Expected], architecture: str, options: dict[str, object]
) -> None:
    peft = expected(architecture)
    given = {"adapters": str(peft.adapters), "dtype": "float32", "kv_cache_bytes": 1 << 22}
    asked = [greedy(name) for name in NAMES]
    with LLM(peft.checkpoint, **given, **options) as llm:
        together = llm.generate(PROMPTS, asked, progress=False)
        alone = [
            llm.generate([prompt], params, progress=False)[0]
            for prompt, params in zip(PROMPTS, asked, strict=True)
        ]
    assert [each.ids for each in together] == peft.right
    assert [each.ids for each in alone] == peft.right
    changed = [right != plain for right, plain in zip(peft.right, peft.plain, strict=True)]
    assert changed == [name is not None for name in NAMES]
