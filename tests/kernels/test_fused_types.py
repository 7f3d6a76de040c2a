"""Types whose layers have other parts than Llama's are fused as a whole: the same logits, and on a
CPU every step is one native call."""

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from jitney.engine.assemble import load_model
from jitney.execution.eagle import StateTap
from jitney.execution.interface import LoadedModel, forward_module
from jitney.execution.low_rank import Factors, LowRank, find_sites
from jitney.kernels.fused.fuse import fuse
from jitney.kernels.fused.trial import relative_error
from jitney.kernels.fused.whole_model import FusedForward
from jitney.read_config import make_config

from benchmarks.architectures import tiny
from benchmarks.architectures.shapes import MAX_LENGTH
from tests.kernels.cpu.test_adapters_in_program import run_all
from tests.kernels.cpu.test_program import run

pytest.importorskip("numba")

from jitney.kernels.cpu.layer_kernels import CpuLayerKernels

FACTORS = {"embedding_multiplier": 6.0, "residual_multiplier": 0.22, "logits_scaling": 8.0}
# What the type has that Llama has not.
TYPES = {
    "gemma2": "norms behind the branches, a factor on the embedding, capped logits",
    "gemma3_text": "the same, and two rotary tables",
    "olmo2": "norms behind the branches alone, float32 angles",
    "smollm3": "a layer without rotary embedding",
    "glm4": "neighbours rotated, in half of a head",
    "ernie4_5": "neighbours rotated by float32 angles",
    "granite": "factors on embedding, branches and logits",
    "cohere2": "layer norms, parallel branches, a factor on the logits",
    "phi": "layer norms with a bias, parallel branches, an MLP without a gate",
    "gpt2": "learned positions, transposed weights, no rotary embedding",
    "mixtral": "experts",
    "qwen3_moe": "experts, behind a layer without them",
}
TOLERANCE = {"float32": 1e-5, "bfloat16": 3e-2}


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def load(folder: Path, name: str, dtype: str) -> LoadedModel:
    config = tiny.make_config(name)
    overrides = FACTORS if name == "granite" else {}
    if name == "smollm3":
        overrides = {"no_rope_layers": [1, 0]}
    if name == "qwen3_moe":
        overrides = {"mlp_only_layers": [0]}
    for key, value in overrides.items():
        setattr(config, key, value)
    tiny.make_model(config).save_pretrained(folder)
    return load_model(make_config({"model": str(folder), "dtype": dtype, "device": "cpu"}))


def fused_forward(model: LoadedModel, dtype: torch.dtype) -> FusedForward:
    report = fuse(model.module, CpuLayerKernels(dtype, 8), MAX_LENGTH)
    assert report.forward is not None, report.reasons
    return report.forward


@pytest.mark.parametrize("name", TYPES)
def test_one_call_gives_the_same_bits(tmp_path: Path, name: str) -> None:
    """As kernel by kernel; and close to the module before it was fused."""
    model = load(tmp_path, name, "bfloat16")
    plain = run(lambda *step: forward_module(model.module, *step), model)
    forward = fused_forward(model, torch.bfloat16)
    assert forward.program is not None, forward.why_no_program
    program = run(forward, model)
    forward.program = None
    assert torch.equal(program, run(forward, model))
    assert relative_error(program, plain) < TOLERANCE["bfloat16"]


@pytest.mark.parametrize("name", TYPES)
def test_the_same_logits_in_float32(tmp_path: Path, name: str) -> None:
    model = load(tmp_path, name, "float32")
    plain = run(lambda *step: forward_module(model.module, *step), model, torch.float32)
    fused = run(fused_forward(model, torch.float32), model, torch.float32)
    assert relative_error(fused, plain) < TOLERANCE["float32"]


@pytest.mark.parametrize("name", ["granite", "cohere2", "phi", "gpt2"])
def test_adapters_change_each_linear_layer(tmp_path: Path, name: str) -> None:
    """As if their products were part of its weight."""
    model = load(tmp_path, name, "bfloat16")
    model = replace(model, sites=find_sites(model.module))
    plain = run(lambda *step: forward_module(model.module, *step), model)
    generator = torch.Generator().manual_seed(1)
    factors = {}
    merged = copy.deepcopy(model.module)
    for path, site in model.sites.items():
        a = torch.randn(8, site.inputs, generator=generator) / site.inputs**0.5
        b = 0.5 * torch.randn(8, site.outputs, generator=generator)
        factors[path] = Factors(a.bfloat16(), b.bfloat16())
        linear = merged.get_submodule(path)
        added = a.T @ b  # [inputs, outputs], as GPT-2 has its weights
        linear.weight.data += added if name == "gpt2" else added.T
    right = run(lambda *step: forward_module(merged, *step), model)

    report = fuse(model.module, CpuLayerKernels(torch.bfloat16, 8), MAX_LENGTH)
    fused = report.applied(model)
    assert fused.sites == model.sites
    packed = None if fused.pack is None else fused.pack(factors)
    got = run_all(fused, [LowRank("all", factors, packed)] * 3)
    assert relative_error(got, right) < TOLERANCE["bfloat16"]
    assert relative_error(plain, right) > 1e-1


def test_what_the_output_layer_is_given_can_be_read(tmp_path: Path) -> None:
    """As a draft head does, also where logits are capped."""
    model = load(tmp_path, "gemma2", "bfloat16")
    tap = StateTap(model.module)
    report = fuse(model.module, CpuLayerKernels(torch.bfloat16, 8), MAX_LENGTH)
    read = tap.wrap(replace(model, forward=report.forward))
    run(read.forward, model)
    assert tap.last is not None
