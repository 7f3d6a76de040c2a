"""Quantized layers on a GPU: torch's and torchao's products, loading, serving."""

from pathlib import Path

import pytest
import torch
import transformers
from jitney.engine.assemble import load_model, load_runner
from jitney.errors import ConfigError
from jitney.quantization import quantize
from jitney.quantization.eight_bits import Fp8Linear
from jitney.quantization.quantize import quantize_linears
from jitney.quantization.torchao import TorchaoLinear
from jitney.read_config import make_config
from jitney.sampling_params import SamplingParams
from torch import Tensor, nn

from tests.execution.drive import drive
from tests.tiny_models import VOCAB_SIZE, make_checkpoint

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
GPU = torch.device("cuda", 0)
KINDS = ("fp8", "int8", "int4")
# Relative to the norm, of weights and inputs that are normally distributed.
BOUNDS = {"fp8": 0.045, "int8": 0.012, "int4": 0.12}


def random(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(GPU, torch.bfloat16)


def make_layer(kind: str, weight: Tensor, bias: Tensor | None = None) -> nn.Module:
    return (
        Fp8Linear.quantized_from(weight, bias)
        if kind == "fp8"
        else TorchaoLinear.quantized_from(weight, bias, kind)  # type: ignore[arg-type]
    )


def needs(kind: str) -> None:
    try:
        quantize.check_option(kind, torch.bfloat16, GPU)  # type: ignore[arg-type]
    except ConfigError as error:
        pytest.skip(str(error))


def relative(got: Tensor, right: Tensor) -> float:
    return float((got.double() - right.double()).norm() / right.double().norm())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokens", [1, 16, 200])
@pytest.mark.parametrize(("outputs", "inputs"), [(96, 64), (4096, 4096), (4096, 14336), (80, 640)])
def test_products(kind: str, tokens: int, outputs: int, inputs: int) -> None:
    needs(kind)
    x, weight, bias = (
        random(tokens, inputs),
        random(outputs, inputs, seed=1),
        random(outputs, seed=2),
    )
    with torch.inference_mode():
        got = make_layer(kind, weight, bias)(x[None])[0]
    right = x.double() @ weight.double().T + bias.double()
    assert got.dtype == torch.bfloat16
    assert 0 < relative(got, right) < BOUNDS[kind]


@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_never_all_there_as_they_were(tmp_path: Path, kind: str) -> None:
    """The device's peak while loading is the quantized module and a few weights, not all."""
    needs(kind)
    folder = make_checkpoint(
        tmp_path, dtype=torch.bfloat16, hidden_size=2048, intermediate_size=6144,
        num_hidden_layers=16, num_attention_heads=16, num_key_value_heads=16, head_dim=128,
    )  # fmt: skip
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    model = load_model(make_config({"model": str(folder), "quantization": kind}))
    peak = torch.cuda.max_memory_allocated() - before
    assert peak < model.weight_bytes + 0.35 * 2 * model.num_parameters
    assert {p.device for p in model.module.parameters()} == {GPU}
    assert {b.device for b in model.module.buffers()} == {GPU}


@pytest.mark.parametrize("architecture", ["llama", "mixtral", "gpt2"])
@pytest.mark.parametrize("accelerate", [True, False])
def test_unquantized_weights_arrive(
    tmp_path: Path, architecture: str, accelerate: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through transformers onto the device, or from the mapped file by ourselves."""
    if not accelerate:
        monkeypatch.setattr("jitney.execution.weights.is_accelerate_available", lambda: False)
    folder = make_checkpoint(tmp_path, architecture, tie_word_embeddings=True)
    model = load_model(make_config({"model": str(folder), "dtype": "float32"}))
    right = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for (name, got), (_, value) in zip(
        model.module.named_parameters(), right.named_parameters(), strict=True
    ):
        assert got.device == GPU
        assert torch.equal(got.cpu(), value), name
    head = model.module.get_output_embeddings()
    assert head.weight is model.module.get_input_embeddings().weight


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("graphs", ["never", "lazy"])
def test_served_model_is_close_to_generate(tmp_path: Path, kind: str, graphs: str) -> None:
    """In bf16 a step rounds otherwise than ``generate``, so the first tokens alone must agree."""
    needs(kind)
    folder = make_checkpoint(
        tmp_path, dtype=torch.bfloat16, hidden_size=256, intermediate_size=512, head_dim=64
    )
    runner = load_runner(
        make_config({
            "model": str(folder), "device": "cuda", "quantization": kind, "cuda_graphs": graphs,
            "kv_cache_bytes": 16 << 20,
        })
    )  # fmt: skip
    prompt = torch.randint(3, VOCAB_SIZE, (1, 23), generator=torch.Generator().manual_seed(5))
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.bfloat16
    ).cuda()
    quantize_linears(reference, kind, GPU)  # type: ignore[arg-type]
    with torch.inference_mode():
        logits = reference(prompt.cuda(), use_cache=False).logits[0, -1].float()
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, seed=0)
    tokens = drive(runner, [(prompt[0].tolist(), params)]).outputs[0, 0]
    assert len(tokens) == 12
    assert tokens[0] in logits.topk(3).indices.tolist()
