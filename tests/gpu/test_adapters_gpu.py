"""LoRA adapters on a GPU: the grouped products at a model's real sizes, and whole engines.

Run on a machine with an NVIDIA GPU and a CUDA build of torch: ``pytest tests/gpu -m gpu``.
"""

from pathlib import Path

import pytest
import torch
from jitney.execution.low_rank import AdapterSpan, Factors, LowRank, Part, plain_products
from jitney.llm import LLM
from jitney.sampling_params import SamplingParams

from tests.adapters.peft_adapters import ALL, make_adapter
from tests.execution.generate import make_prompts
from tests.tiny_models import make_checkpoint

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


TOLERANCE = {torch.bfloat16: 6e-3, torch.float16: 4e-4, torch.float32: 2e-6}
LAYERS = {
    4096: [Part("q", 0, 4096), Part("k", 4096, 5120), Part("v", 5120, 6144)],
    14336: [Part("down", 0, 4096)],
}
"""By inputs: the parts of a fused layer of Llama 3.1 8B."""


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("inputs", LAYERS)
def test_grouped_products(inputs: int, dtype: torch.dtype) -> None:
    """Near what float64 gives, and bitwise the same for a token alone, in a prefill and among
    others."""
    from jitney.kernels.gpu.adapter_products import GroupedProducts

    parts = LAYERS[inputs]
    products = GroupedProducts([parts])
    generator = torch.Generator("cuda").manual_seed(0)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device="cuda").to(dtype)

    adapters = []
    exact = {}
    for rank in (3, 8, 16, 64):
        factors = {
            part.path: Factors(
                a=noise(rank, inputs) / inputs**0.5,
                b=noise(rank, part.last - part.first) / rank**0.5,
            )
            for part in parts
        }
        adapters.append(LowRank("", factors, products.pack(factors)))
        doubled = {
            path: Factors(pair.a.double(), pair.b.double()) for path, pair in factors.items()
        }
        exact[adapters[-1]] = LowRank("", doubled)
    # A token without an adapter between any two spans.
    spans = []
    first = 1
    for count, n in ((1, 0), (1, 1), (300, 2), (1, 3), (17, 0), (1, 2), (40, 3)):
        spans.append(AdapterSpan(first, first + count, adapters[n]))
        first += count + 1
    x = noise(first, inputs)
    out = noise(first, parts[-1].last)
    right = out.double()
    got = out.clone()
    exact_spans = [span._replace(adapter=exact[span.adapter]) for span in spans]
    plain_products(exact_spans)(parts, x.double(), right)
    products.begin(spans)(parts, x, got)
    assert float((got.double() - right).norm() / right.norm()) < TOLERANCE[dtype]
    for begin, end, adapter in spans:
        alone = out[begin:end].clone()
        products.begin([AdapterSpan(0, end - begin, adapter)])(parts, x[begin:end], alone)
        assert torch.equal(alone, got[begin:end])
        for token in {begin, end - 1}:
            one = out[token : token + 1].clone()
            products.begin([AdapterSpan(0, 1, adapter)])(parts, x[token : token + 1], one)
            assert torch.equal(one, got[token : token + 1])
    free = torch.ones(first, dtype=torch.bool, device="cuda")
    for begin, end, _ in spans:
        free[begin:end] = False
    assert torch.equal(got[free], out[free])


@pytest.mark.parametrize("architecture", ["llama", "phi3", "gpt2"])
def test_engines_with_adapters(tmp_path: Path, architecture: str) -> None:
    """In float32 with the GPU's kernels, fused and not: the tokens of plain torch there."""
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
    for options in (
        {"attention": "gpu"},
        {"attention": "gpu", "fuse": False},
        {"attention": "reference", "fuse": False},
    ):
        given = {"adapters": str(tmp_path / "adapters"), "device": "cuda", "dtype": "float32"}
        with LLM(path, **given, kv_cache_bytes=8 << 20, **options) as llm:
            outputs = llm.generate(make_prompts(9, 21, 5, 40, 13, 21), params, progress=False)
        tokens.append([each.ids for each in outputs])
    assert tokens[0] == tokens[2]
    assert tokens[1] == tokens[2]
