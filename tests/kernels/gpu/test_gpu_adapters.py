"""Requests with adapters through the GPU's runner, its kernels interpreted: the tokens of plain
torch, whether the model is fused or not."""

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
from jitney.kernels.gpu.adapter_products import GroupedProducts

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


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Of each pair of launches: how many linear layers it was for."""
    counts: list[int] = []
    real = GroupedProducts._launch

    def launch(self, work, parts, x, out) -> None:
        counts.append(len(parts))
        real(self, work, parts, x, out)

    monkeypatch.setattr(GroupedProducts, "_launch", launch)
    return counts


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
    ("architecture", "fuse", "layers"),
    [
        pytest.param("llama", True, {3, 1, 2}, marks=SLOW),
        pytest.param("llama", False, {1}, marks=SLOW),
        pytest.param("phi3", True, {1}, marks=SLOW),
        pytest.param("gpt2", True, {1}, marks=SLOW),
    ],
)
def test_a_batch_of_adapters_gives_the_tokens_of_plain_torch(
    tmp_path: Path, architecture: str, fuse: bool, layers: set[int], launched: list[int]
) -> None:
    """Its kernels are compiled before the first request: steps of the load have launched them."""
    path = make(tmp_path, architecture)
    with load(path, attention="gpu", fuse=fuse) as llm:
        assert set(launched) == layers
        launched.clear()
        got = served(llm, NAMES)
        assert set(launched) == layers
        launched.clear()
        without = served(llm, [None] * 4)
    with load(path, attention="reference", fuse=False, prepack=False) as llm:
        assert got == served(llm, NAMES)
        assert without == served(llm, [None] * 4)
    assert launched == []
    changed = [mine != theirs for mine, theirs in zip(got, without, strict=True)]
    assert changed == [name is not None for name in NAMES]
