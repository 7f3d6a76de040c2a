"""Adapters where only some modules of a model are fused, or where some of a fused model are not:
each changes its own layers, and the others stay fused."""

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from jitney.engine.assemble import load_runner
from jitney.execution.low_rank import Factors, Site
from jitney.execution.quantized import weight_of
from jitney.execution.runner import TorchRunner
from jitney.read_config import make_config
from jitney.sampling_params import SamplingParams

from benchmarks.architectures.tiny import make_config as make_tiny_config
from benchmarks.architectures.tiny import make_model
from tests.execution.drive import Driven, drive
from tests.execution.generate import eager, expected_outputs, make_prompts
from tests.execution.like_generate import options_for

pytest.importorskip("numba")
from jitney.kernels.fused.adapted import AdaptedForward, AdaptedModules
from jitney.kernels.fused.layers import FusedDecoderLayer, FusedMLP

COUNT = 8
GREEDY = SamplingParams(temperature=0.0, max_tokens=COUNT, ignore_eos=True, seed=0)
SLOW = pytest.mark.slow


def make_factors(sites: Mapping[str, Site], rank: int) -> dict[str, Factors]:
    """Of every layer that may have any."""
    generator = torch.Generator().manual_seed(rank)
    return {
        path: Factors(
            a=torch.randn(rank, site.inputs, generator=generator) / site.inputs**0.5,
            b=torch.randn(rank, site.outputs, generator=generator) / (4 * rank) ** 0.5,
        )
        for path, site in sites.items()
    }


def tokens_of_torch(
    folder: Path, prompt: list[int], factors: Mapping[str, Factors]
) -> dict[tuple[int, int], list[int]]:
    """With the products in the weights."""
    module = eager(folder)
    with torch.no_grad():
        for path, pair in factors.items():
            weight = weight_of(module.get_submodule(path))
            weight += pair.b.T @ pair.a
    return expected_outputs(module, [prompt], COUNT)


@pytest.mark.parametrize(
    ("model_type", "form", "fused", "joined"),
    [
        ("cohere", AdaptedModules, FusedMLP, "model.layers.0.mlp.gate_proj"),
        # Experts beside an MLP that is fused by itself.
        ("qwen2_moe", AdaptedForward, FusedMLP, "model.layers.1.mlp.shared_expert.up_proj"),
        pytest.param(
            "ernie4_5_moe",
            AdaptedModules,
            FusedMLP,
            "model.layers.0.mlp.gate_proj",
            marks=SLOW,
        ),
        # Layers with a product of their own inside.
        pytest.param(
            "gemma3n_text", AdaptedModules, FusedMLP, "model.layers.0.mlp.up_proj", marks=SLOW
        ),
        # One layer is fused, the other has states.
        (
            "olmo_hybrid",
            AdaptedModules,
            FusedDecoderLayer,
            "model.layers.1.self_attn.k_proj",
        ),
    ],
)
def test_a_batch_has_the_tokens_of_torch(
    tmp_path: Path, model_type: str, form: type, fused: type, joined: str
) -> None:
    folder = tmp_path / "m"
    make_model(make_tiny_config(model_type)).save_pretrained(folder)
    adapters = tmp_path / "adapters"
    adapters.mkdir()
    runner = load_runner(make_config(options_for(folder, adapters=str(adapters))))
    assert isinstance(runner, TorchRunner)
    assert isinstance(runner._model.forward, form)
    assert any(isinstance(each, fused) for each in runner._model.module.modules())
    assert joined in runner.sites

    prompts = make_prompts(5, 17, 9)
    factors = [make_factors(runner.sites, 4), {}, make_factors(runner.sites, 7)]
    made = {key: runner.make_adapter(str(key), each) for key, each in enumerate(factors) if each}
    got = drive(runner, [(prompt, GREEDY) for prompt in prompts], adapters=made)
    runner.close()
    assert_tokens_of_torch(folder, prompts, factors, got)


def test_an_opaque_cache_of_latents(tmp_path: Path) -> None:
    """Its module makes keys and values of the whole context anew in each pass."""
    folder = tmp_path / "m"
    make_model(make_tiny_config("deepseek_v32")).save_pretrained(folder)
    adapters = tmp_path / "adapters"
    adapters.mkdir()
    runner = load_runner(make_config(options_for(folder, adapters=str(adapters))))
    assert runner.info.cache == "opaque"
    prompts = make_prompts(5, 17)
    factors = [make_factors(runner.sites, 4), {}]
    made = {0: runner.make_adapter("0", factors[0])}
    got = drive(runner, [(prompt, GREEDY) for prompt in prompts], adapters=made)
    runner.close()
    assert_tokens_of_torch(folder, prompts, factors, got)


def assert_tokens_of_torch(
    folder: Path,
    prompts: list[list[int]],
    factors: list[dict[str, Factors]],
    got: Driven,
) -> None:
    for key, prompt in enumerate(prompts):
        expected = tokens_of_torch(folder, prompt, factors[key])
        assert got.outputs[key, 0] == expected[0, 0]
        assert (tokens_of_torch(folder, prompt, {}) != expected) == bool(factors[key])
