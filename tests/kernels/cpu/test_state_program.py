"""Models with state layers as one native call per step: the bits of kernel by kernel."""

from dataclasses import replace

import pytest
import torch
from jitney.engine.assemble import load_model
from jitney.execution.attention import build_metadata
from jitney.execution.interface import LoadedModel, PagedStep
from jitney.execution.state_slots import StateSlots
from jitney.kernels.fused.fuse import fuse
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


@pytest.mark.parametrize("model_type", ["lfm2", "qwen3_5_text", "bamba"])
def test_one_call_gives_the_same_bits(tmp_path, model_type: str) -> None:
    folder = state_type(tmp_path, model_type)
    config = make_config({"model": str(folder), "dtype": "bfloat16", "device": "cpu"})
    model = load_model(config)
    kernels = CpuLayerKernels(torch.bfloat16, 8)
    fused = fuse(model.module, kernels, 256, states=model.states).forward
    assert fused is not None
    assert isinstance(fused.program, LayerProgram)
    program = run(fused, model)
    fused.program = None
    assert torch.equal(program, run(fused, model))
