"""Products on the tile unit, and a step's layers as one native call, where there is such a unit."""

import pytest
import torch
from jitney.config import make_config
from jitney.execution.attention import build_metadata
from jitney.execution.fuse import fuse_modules
from jitney.execution.interface import LayerCache, PagedStep, forward
from jitney.execution.linear import relative_error
from jitney.execution.memory import make_layer_caches
from jitney.execution.models import load_model
from jitney.request import Row
from jitney.sampling_params import SamplingParams
from torch.nn import functional

from tests.tiny_models import VOCAB_SIZE, make_checkpoint

pytest.importorskip("numba")

from jitney.execution.panels import GatedPanels, PanelKernel, PanelLinear, can_use_panels

pytestmark = pytest.mark.skipif(
    not can_use_panels(torch.bfloat16), reason="the processor has no tile unit"
)

TOLERANCE = 4e-3
BLOCK_SIZE = 16
BLOCKS_PER_ROW = 8


@pytest.fixture(scope="module")
def kernel() -> PanelKernel:
    return PanelKernel()


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


@pytest.mark.parametrize("shape", [(32, 32), (96, 64), (768, 1056)])
@pytest.mark.parametrize("rows", [1, 5, 16, 17, 31, 32, 33, 127, 128, 300])
@pytest.mark.parametrize("with_bias", [True, False])
def test_product(kernel, shape, rows, with_bias) -> None:
    """Whole tiles and every kind of rest, alone and with a sum."""
    weight, x, other = draw(*shape) * 0.2, draw(1, rows, shape[1]), draw(1, rows, shape[0], seed=1)
    bias = draw(shape[0], seed=2) if with_bias else None
    right = functional.linear(x.float(), weight.float(), None if bias is None else bias.float())
    layer = PanelLinear(weight, bias, kernel)
    assert relative_error(layer(x), right) < TOLERANCE
    assert relative_error(layer.plus(x, other), right + other.float()) < TOLERANCE


@pytest.mark.parametrize("rows", [1, 40])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_gated(kernel, rows, activation) -> None:
    weight, bias, x = draw(192, 64) * 0.3, draw(192, seed=1), draw(1, rows, 64)
    gate, up = functional.linear(x.float(), weight.float(), bias.float()).chunk(2, -1)
    if activation == "silu":
        right = functional.silu(gate) * up
    else:
        right = functional.gelu(gate, approximate="tanh") * up
    layer = PanelLinear(weight, bias, kernel, activation)
    assert relative_error(layer(x), right) < TOLERANCE


def test_activation_at_extremes(kernel) -> None:
    """Large gates give themselves times up or nothing, and no NaN."""
    identity = torch.eye(32).bfloat16()
    layer = PanelLinear(torch.cat([identity, identity]), None, kernel, "silu")
    x = torch.tensor([-3e38, -1e4, -90.0, -20.0, 0.0, 20.0, 90.0, 1e4] * 4).bfloat16()
    got = layer(x[None, None])[0, 0, 1:8].float()
    assert got.isfinite().all()
    assert (got[:2].abs() < 1e-25).all()
    assert torch.allclose(got[4:], x[5:8].float() ** 2, rtol=1e-2)


def test_nothing_is_read_or_written_beyond_the_rows(kernel) -> None:
    """Neighbours of the input are NaN, and neighbours of a result stay as they were."""
    weight = draw(64, 64)
    padded = torch.full((40, 64), float("nan")).bfloat16()
    padded[3:22] = draw(19, 64)
    layer = PanelLinear(weight, None, kernel)
    assert torch.equal(layer(padded[3:22]), layer(padded[3:22].clone()))
    assert layer(padded[3:22]).isfinite().all()


def test_a_row_is_the_same_in_every_batch(kernel) -> None:
    layer = PanelLinear(draw(64, 96), draw(64, seed=1), kernel)
    x = draw(150, 96)
    together = layer(x)
    for first, last in ((0, 1), (7, 30), (100, 133)):
        assert torch.equal(layer(x[first:last]), together[first:last])


# --------------------------------------------------------------------------- the whole step


def rows_of(spec: list[tuple[int, int]]) -> list[Row]:
    """(first position, tokens) of each row; row i lives in blocks of its own."""
    return [
        Row(
            key=i,
            index=0,
            token_ids=[(37 * i + 11 * p) % VOCAB_SIZE for p in range(start, start + count)],
            start=start,
            block_table=[i * BLOCKS_PER_ROW + n for n in range(BLOCKS_PER_ROW)],
            sample=(0,),
            params=SamplingParams(),
            prompt=[1],
            output=[],
            stop_ids=frozenset(),
            bad_words_ids=[],
        )
        for i, (start, count) in enumerate(spec)
    ]


STEPS = [
    [(0, 50), (0, 3), (0, 1)],
    [(50, 17), (3, 30), (1, 1)],
    [(67, 1), (33, 1), (2, 1)],
    [(68, 1)],
    [(69, 40), (34, 1)],
]


def run(module, caches: list[LayerCache]) -> torch.Tensor:
    results = []
    for spec in STEPS:
        rows = rows_of(spec)
        meta = build_metadata(rows, BLOCK_SIZE)
        ids = torch.tensor([token for row in rows for token in row.token_ids])
        last = meta.query_start[1:].long() - 1
        results.append(forward(module, ids, meta.positions, last, PagedStep(caches, meta)).clone())
    return torch.cat(results)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2", "qwen3"])
def test_one_call_gives_the_same_bits(tmp_path, name: str, threads: int) -> None:
    """As kernel by kernel; and close to the module before it was fused."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        path = make_checkpoint(tmp_path, name)
        options = {"model": str(path), "dtype": "bfloat16", "device": "cpu"}
        model = load_model(make_config(options))
        module = model.module

        def fresh() -> list[LayerCache]:
            return make_layer_caches(
                model.layers, 3 * BLOCKS_PER_ROW, BLOCK_SIZE, torch.bfloat16, model.device, "cpu"
            )

        plain = run(module, fresh())
        report = fuse_modules(module, 8)
        assert report.program
        assert module.forward._program.has_head
        assert all(isinstance(layer.mlp, GatedPanels) for layer in module.model.layers)
        program = run(module, fresh())
        module.forward._program = None
        kernel_by_kernel = run(module, fresh())
        assert torch.equal(program, kernel_by_kernel)
        assert relative_error(program, plain) < 5e-2
    finally:
        torch.set_num_threads(before)


def test_other_steps_run_kernel_by_kernel(tmp_path) -> None:
    """A recorder, or the reference attention, is not something a program can call."""
    path = make_checkpoint(tmp_path, "llama")
    options = {"model": str(path), "dtype": "bfloat16", "device": "cpu"}
    model = load_model(make_config(options))
    assert fuse_modules(model.module, 8).program
    program = model.module.forward._program
    assert not program.fits(lambda call: call.query)
    for attention, fits in (("reference", False), ("cpu", True)):
        caches = make_layer_caches(
            model.layers, 8, BLOCK_SIZE, torch.bfloat16, model.device, attention
        )
        meta = build_metadata(rows_of([(0, 3)]), BLOCK_SIZE)
        assert program.fits(PagedStep(caches, meta)) is fits
