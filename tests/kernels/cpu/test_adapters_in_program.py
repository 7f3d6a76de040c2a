"""Adapters within a step's native call: what module by module gives, and the same bits alone."""

from dataclasses import replace

import pytest
import torch
from jitney.execution.attention import build_metadata
from jitney.execution.interface import LoadedModel, PagedStep
from jitney.execution.low_rank import Factors, LowRank, find_sites
from jitney.kernels.fused.fuse import fuse
from jitney.kernels.fused.trial import relative_error

from tests.kernels.cpu.test_program import (
    BLOCK_SIZE,
    STEPS,
    caches_of,
    load,
    rows_of,
)

pytest.importorskip("numba")

from jitney.kernels.cpu import column_linear
from jitney.kernels.cpu.layer_kernels import CpuLayerKernels
from jitney.kernels.cpu.program import LayerProgram


def fused(tmp_path, name: str, quantization: str = "none") -> LoadedModel:
    model = load(tmp_path, name, quantization)
    model = replace(model, sites=find_sites(model.module))
    return fuse(model.module, CpuLayerKernels(torch.bfloat16, 8), 256).applied(model)


def make_adapters(model: LoadedModel, scale: float = 0.2) -> list[LowRank | None]:
    """Of several ranks, on some of the layers; and none."""
    generator = torch.Generator().manual_seed(1)

    def adapter(rank: int, *targets: str) -> LowRank:
        factors = {}
        for path, (inputs, outputs) in model.sites.items():
            if not targets or path.endswith(targets):
                a = torch.randn(rank, inputs, generator=generator) / inputs**0.5
                b = scale * torch.randn(rank, outputs, generator=generator)
                factors[path] = Factors(a.bfloat16(), b.bfloat16())
        return LowRank(f"{rank}{targets}", factors, model.pack(factors))

    wide = "q_proj", "qkv_proj", "v_proj"
    return [adapter(16), None, adapter(5, *wide), adapter(40, "up_proj", "down_proj", "o_proj")]


def run(model: LoadedModel, spec, adapters, caches, chosen=None) -> torch.Tensor:
    """Logits of the last token of every row of a step, or of the ``chosen`` one alone."""
    rows = rows_of(spec)
    for row, adapter in zip(rows, adapters, strict=True):
        row.adapter = adapter
    if chosen is not None:
        rows = rows[chosen : chosen + 1]
    meta = build_metadata(rows, BLOCK_SIZE)
    ids = torch.tensor([token for row in rows for token in row.token_ids])
    last = meta.query_start[1:].long() - 1
    return model.forward(ids, meta.positions, last, PagedStep(caches, meta)).clone()


def run_all(model: LoadedModel, adapters) -> torch.Tensor:
    caches = caches_of(model, "cpu")
    given = adapters[: len(STEPS[0])]
    return torch.cat([run(model, spec, given[: len(spec)], caches) for spec in STEPS])


@pytest.mark.parametrize(
    ("name", "quantization", "tiles"),
    [
        ("llama", "none", False),
        ("llama", "int8", False),
        pytest.param("llama", "int4", False, marks=pytest.mark.slow),
        pytest.param("qwen3", "none", False, marks=pytest.mark.slow),
        pytest.param("phi3", "none", False, marks=pytest.mark.slow),
        ("gemma2", "none", False),  # norms behind the branches
        ("llama", "none", True),
        ("llama", "int8", True),
        pytest.param("llama", "int4", True, marks=pytest.mark.slow),
        ("qwen3", "none", True),
        ("phi3", "none", True),
    ],
)
def test_the_native_call_adds_what_modules_do(
    tmp_path, monkeypatch, name: str, quantization: str, tiles: bool
) -> None:
    if tiles and not column_linear.may_use_amx():
        pytest.skip("the processor has no tile unit")
    monkeypatch.setattr(column_linear, "may_use_amx", lambda: tiles)
    model = fused(tmp_path, name, quantization)
    assert isinstance(model.forward.program, LayerProgram)
    first, none, second, third = make_adapters(model)
    plain = run_all(model, [None] * 4)
    for some in ([first, none, second], [third, first, first], [none, none, third]):
        native = run_all(model, some)
        program, model.forward.program = model.forward.program, None
        try:
            right = run_all(model, some)
        finally:
            model.forward.program = program
        assert relative_error(native, right) < 5e-2
        assert relative_error(plain, right) > 1e-1


def test_a_row_alone_has_the_same_bits(tmp_path) -> None:
    """Whatever adapters the rows beside it have, and though a call before had others."""
    model = fused(tmp_path, "llama")
    adapters = make_adapters(model)
    spec = [(0, 9), (0, 30), (0, 1)]
    decodes = [(start + count, 1) for start, count in spec]
    for order in (adapters, adapters[::-1], [adapters[0]] * 4):
        together, alone = caches_of(model, "cpu"), caches_of(model, "cpu")
        for step in (spec, decodes):
            batch = run(model, step, order[:3], together)
            each = [run(model, step, order[:3], alone, row) for row in range(3)]
            assert torch.equal(batch, torch.cat(each))
