"""LoRA adapters on a GPU: whole engines.

Run on a machine with an NVIDIA GPU and a CUDA build of torch: ``pytest tests/gpu -m gpu``.
"""

from pathlib import Path

import pytest
import torch
from jitney.llm import LLM
from jitney.sampling_params import SamplingParams

from tests.adapters.peft_adapters import ALL, make_adapter
from tests.execution.generate import make_prompts
from tests.tiny_models import make_checkpoint

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("architecture", ["llama", "phi3", "gpt2"])
def test_engines_with_adapters(tmp_path: Path, architecture: str) -> None:
    """In float32: with the GPU's attention the tokens that plain torch gives there."""
    path = make_checkpoint(tmp_path / "m", architecture, tokenizer=True)
    merged = {"phi3": ("qkv_proj", "gate_up_proj", "down_proj"), "gpt2": ("c_attn", "c_fc")}
    targets = list(merged.get(architecture, ALL))
    for seed, rank in enumerate((3, 16, 24)):
        folder = tmp_path / "adapters" / str(rank)
        make_adapter(path, folder, seed=seed, r=rank, target_modules=targets)
    names = ["16", None, "3", "24", "16", "3"]
    params = [
        SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, lora_name=name)
        for name in names
    ]
    tokens = []
    for attention in ("gpu", "reference"):
        given = {"adapters": str(tmp_path / "adapters"), "device": "cuda", "dtype": "float32"}
        with LLM(path, **given, kv_cache_bytes=8 << 20, attention=attention) as llm:
            outputs = llm.generate(make_prompts(9, 21, 5, 40, 13, 21), params, progress=False)
        tokens.append([each.ids for each in outputs])
    assert tokens[0] == tokens[1]
