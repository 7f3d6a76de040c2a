"""Requests with adapters through the GPU's runner, its attention interpreted: the tokens that the
reference attention gives."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from jitney.llm import LLM
from jitney.sampling_params import SamplingParams

from tests.adapters.peft_adapters import ALL, make_adapter
from tests.execution.generate import make_prompts
from tests.tiny_models import make_checkpoint

pytest.importorskip("triton")

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="interpreted on a CPU")

SLOW = pytest.mark.slow
NAMES = ("narrow", None, "wide", "narrow")


TARGETS = {"llama": ALL, "phi3": ("qkv_proj", "gate_up_proj", "down_proj"), "gpt2": ("c_fc",)}


def make(folder: Path, architecture: str) -> Path:
    """A model of one layer, beside it a folder of its adapters."""
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    some = {} if architecture == "gpt2" else heads
    path = make_checkpoint(folder / "m", architecture, tokenizer=True, num_hidden_layers=1, **some)
    targets = TARGETS[architecture]
    kinds = {
        "narrow": {"r": 3, "target_modules": [targets[-1]], "lora_alpha": 8},
        "wide": {"r": 20, "target_modules": list(targets), "rank_pattern": {"k_proj": 5}},
    }
    for seed, (name, fields) in enumerate(kinds.items()):
        make_adapter(path, folder / "adapters" / name, seed=seed, **fields)
    return path


def load(path: Path, **options: object) -> LLM:
    given = {
        "adapters": str(path.parent / "adapters"), "device": "cpu", "dtype": "float32",
        "kv_cache_bytes": 1 << 20, "threads": 1, "block_size": 4, "max_num_batched_tokens": 16,
        **options,
    }  # fmt: skip
    return LLM(path, **given)


def served(llm: LLM, names: Sequence[str | None]) -> list[list[int]]:
    """The tokens of a request for each name, all in one batch."""
    params = [
        SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, lora_name=name)
        for name in names
    ]
    outputs = llm.generate(make_prompts(9, 5, 7, 4), params, progress=False)
    return [each.ids for each in outputs]


@pytest.mark.parametrize(
    "architecture",
    ["llama", pytest.param("phi3", marks=SLOW), pytest.param("gpt2", marks=SLOW)],
)
def test_a_batch_of_adapters_gives_the_tokens_of_plain_torch(
    tmp_path: Path, architecture: str
) -> None:
    path = make(tmp_path, architecture)
    with load(path, attention="gpu") as llm:
        got = served(llm, NAMES)
        without = served(llm, [None] * 4)
    with load(path, attention="reference", fuse=False, prepack=False) as llm:
        assert got == served(llm, NAMES)
        assert without == served(llm, [None] * 4)
    changed = [mine != theirs for mine, theirs in zip(got, without, strict=True)]
    assert changed == [name is not None for name in NAMES]
