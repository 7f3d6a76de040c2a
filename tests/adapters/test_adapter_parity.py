"""Requests with adapters get PEFT's tokens, alone and beside others."""

from pathlib import Path

import pytest
from jitney.llm import LLM
from jitney.sampling_params import SamplingParams

from tests.adapters.peft_adapters import ALL, make_adapter, peft_tokens
from tests.execution.generate import make_prompts
from tests.tiny_models import make_checkpoint

COUNT = 12
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


def make_adapters(checkpoint: Path, root: Path, architecture: str) -> dict[str | None, Path | None]:
    """Of several ranks, scales and targets, by name; and none."""
    targets, pattern = TARGETS[architecture]
    kinds = {
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
    made: dict[str | None, Path | None] = {None: None}
    for seed, (name, fields) in enumerate(kinds.items()):
        made[name] = make_adapter(checkpoint, root / name, seed=seed, **fields)
    return made


@pytest.mark.parametrize(
    ("architecture", "options"),
    [
        ("llama", PLAIN),
        ("llama", UNFUSED),
        ("llama", {}),
        ("gemma2", {}),
        ("phi3", {}),
        ("gpt2", {}),
        ("qwen3_moe", {}),
    ],
)
def test_a_batch_of_adapters_gives_the_tokens_of_peft(
    tmp_path: Path, architecture: str, options: dict[str, object]
) -> None:
    checkpoint = make_checkpoint(tmp_path / "m", architecture, tokenizer=True)
    adapters = make_adapters(checkpoint, tmp_path / "adapters", architecture)
    prompts = make_prompts(9, 21, 5, 40, 13, 21)
    names = ["few", None, "all", "root", "all", "few"]
    asked = list(zip(prompts, names, strict=True))
    options = {"adapters": str(tmp_path / "adapters"), "kv_cache_bytes": 1 << 22, **options}
    with LLM(checkpoint, **options) as llm:
        together = llm.generate(prompts, [greedy(name) for name in names], progress=False)
        alone = [llm.generate([p], greedy(name), progress=False)[0] for p, name in asked]
    right = [peft_tokens(checkpoint, adapters[name], p, COUNT) for p, name in asked]
    plain = [peft_tokens(checkpoint, None, p, COUNT) for p in prompts]
    assert [each.ids for each in together] == right
    assert [each.ids for each in alone] == right
    changed = [a != b for a, b in zip(right, plain, strict=True)]
    assert changed == [name is not None for name in names]
