"""Models with state layers as one native call per step: the bits of kernel by kernel."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from jitney.engine.assemble import load_model
from jitney.execution.attention import build_metadata
from jitney.execution.interface import LoadedModel, PagedStep
from jitney.execution.state_slots import StateSlots
from jitney.kernels.fused.fuse import FuseReport, fuse
from jitney.read_config import make_config

from tests.execution.state_types import state_type
from tests.kernels.cpu.test_program import BLOCK_SIZE, STEPS, caches_of, rows_of

pytest.importorskip("numba")

from jitney.kernels.cpu.layer_kernels import CpuLayerKernels
from jitney.kernels.cpu.program import LayerProgram

SLOTS = (3, 0, 2)
"""By row."""


def run(step, model: LoadedModel) -> torch.Tensor:
    """Logits of the last token of every row of STEPS."""
    assert model.states is not None
    states = StateSlots(model.states, num_slots=4, device=model.device)
    caches = caches_of(model, "cpu")
    results = []
    for spec in STEPS:
        rows = [replace(row, slot=SLOTS[row.key]) for row in rows_of(spec)]
        meta = build_metadata(rows, BLOCK_SIZE)
        ids = torch.tensor([token for row in rows for token in row.token_ids])
        last = meta.query_start[1:].long() - 1
        with torch.inference_mode():
            paged = PagedStep(caches, meta, states)
            results.append(step(ids, meta.positions, last, paged).clone())
    return torch.cat(results)


def load(tmp_path: Path, model_type: str) -> LoadedModel:
    folder = state_type(tmp_path, model_type)
    return load_model(make_config({"model": str(folder), "dtype": "bfloat16", "device": "cpu"}))


def fuse_all(model: LoadedModel) -> FuseReport:
    kernels = CpuLayerKernels(torch.bfloat16, 8)
    return fuse(model.module, kernels, 256, states=model.states)


@pytest.mark.parametrize("model_type", ["lfm2", "qwen3_5_text", "bamba"])
def test_one_call_gives_the_same_bits(tmp_path, model_type: str) -> None:
    model = load(tmp_path, model_type)
    fused = fuse_all(model).forward
    assert fused is not None
    assert isinstance(fused.program, LayerProgram)
    program = run(fused, model)
    fused.program = None
    assert torch.equal(program, run(fused, model))


def test_a_module_that_no_kernel_computes_is_kept_and_named(tmp_path) -> None:
    report = fuse_all(load(tmp_path, "olmo_hybrid"))
    assert report.forward is None
    kept = "layer with states: no kernel computes what a OlmoHybridGatedDeltaNet does"
    assert report.reasons[kept] == 2


def test_a_module_that_computes_something_else_is_kept(tmp_path) -> None:
    model = load(tmp_path, "lfm2")
    for layer in model.module.model.layers[::2]:
        in_rows = layer.conv.forward
        in_rows.own_forward = partial(doubled, in_rows.own_forward)
    report = fuse_all(model)
    assert report.forward is None
    assert report.reasons["layer with states: its result differs"] == 2


def doubled(forward: Any, *args: Any, **kwargs: Any) -> Any:
    return 2 * forward(*args, **kwargs)


def test_with_adapters_modules_with_states_stay_as_they_are(tmp_path) -> None:
    """Without a layout of states, as a model with adapters is fused."""
    model = load(tmp_path, "lfm2")
    report = fuse(model.module, CpuLayerKernels(torch.bfloat16, 8), 256)
    assert report.forward is None
    assert report.swapped["layer"] == 2
