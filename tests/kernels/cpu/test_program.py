"""A step's layers as one native call: the same bits as kernel by kernel.

Where the processor has no tile unit, loops stand in for its products.
"""

import pytest
import torch
from jitney.config import make_config
from jitney.engine.assemble import load_model
from jitney.execution.attention import build_metadata
from jitney.execution.interface import LayerCache, LoadedModel, PagedStep, forward
from jitney.execution.memory import make_layer_caches
from jitney.kernels.fused.trial import relative_error
from jitney.messages import Row
from jitney.sampling_params import SamplingParams

from tests.kernels.attention.choose import for_layers
from tests.tiny_models import VOCAB_SIZE, make_checkpoint

pytest.importorskip("numba")

from jitney.kernels.cpu import tile_linear
from jitney.kernels.cpu.accelerator import fuse_for_cpu
from jitney.kernels.cpu.linear import can_pack
from jitney.kernels.cpu.products import host_has_amx
from jitney.kernels.cpu.program import LayerProgram
from jitney.kernels.cpu.simd import BF16, ZERO, inner, load_one, store_f32

pytestmark = pytest.mark.skipif(
    can_pack(torch.bfloat16) is not None,
    reason=f"bfloat16 is not packed: {can_pack(torch.bfloat16)}",
)
BLOCK_SIZE = 16
BLOCKS_PER_ROW = 8


@pytest.fixture(autouse=True)
def _tile_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    if host_has_amx():
        return
    monkeypatch.setattr(tile_linear, "multiply_32", make_multiply(32))
    monkeypatch.setattr(tile_linear, "multiply_16", make_multiply(16))
    monkeypatch.setattr(tile_linear, "may_use_amx", lambda: True)
    # Part of the key of what Numba keeps.
    version = tile_linear.source_version()
    monkeypatch.setattr(tile_linear, "source_version", lambda: version + 1)


def make_multiply(rows: int):
    """float32 ``out`` [rows, 32] = rows of x times two columns of a packed weight."""

    @inner
    def multiply(x, x_stride, column, steps, out):
        for m in range(rows):
            for n in range(32):
                total = ZERO
                weight = column + n // 16 * steps * 1024 + n % 16 * 4
                for k in range(32 * steps):
                    at = weight + k // 2 * 64 + k % 2 * 2
                    total += load_one(BF16, x + m * x_stride + 2 * k) * load_one(BF16, at)
                store_f32(out + m * 128 + n * 4, total)

    return multiply


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


def run(step, model: LoadedModel) -> torch.Tensor:
    """Logits of the last token of every row of STEPS."""
    results, caches = [], caches_of(model, "cpu")
    for spec in STEPS:
        rows = rows_of(spec)
        meta = build_metadata(rows, BLOCK_SIZE)
        ids = torch.tensor([token for row in rows for token in row.token_ids])
        last = meta.query_start[1:].long() - 1
        with torch.inference_mode():
            results.append(step(ids, meta.positions, last, PagedStep(caches, meta)).clone())
    return torch.cat(results)


def load(tmp_path, name: str) -> LoadedModel:
    options = {"model": str(make_checkpoint(tmp_path, name)), "dtype": "bfloat16", "device": "cpu"}
    return load_model(make_config(options))


def caches_of(model: LoadedModel, attention: str) -> list[LayerCache]:
    functions = for_layers(attention, model.layers, torch.bfloat16, model.device)
    blocks = 3 * BLOCKS_PER_ROW
    return make_layer_caches(
        model.layers, functions, BLOCK_SIZE, torch.bfloat16, model.device, blocks
    )


@pytest.mark.parametrize(
    ("name", "threads"), [("llama", 2), ("mistral", 1), ("qwen2", 2), ("qwen3", 1)]
)
def test_one_call_gives_the_same_bits(tmp_path, name: str, threads: int) -> None:
    """As kernel by kernel; and close to the module before it was fused."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        model = load(tmp_path, name)
        plain = run(lambda *step: forward(model.module, *step), model)
        fused = fuse_for_cpu(model.module, 8, 256).forward
        assert isinstance(fused.program, LayerProgram)
        program = run(fused, model)
        fused.program = None
        assert torch.equal(program, run(fused, model))
        assert relative_error(program, plain) < 5e-2
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("name", ["gemma2", "gpt_oss", "olmo2", "mixtral"])
def test_other_forms_run_kernel_by_kernel(tmp_path, name: str) -> None:
    """With norms behind the branches, sinks, or experts."""
    fused = fuse_for_cpu(load(tmp_path, name).module, 8, 256).forward
    assert fused is None or fused.program is None


def test_other_steps_run_kernel_by_kernel(tmp_path) -> None:
    """A recorder, the reference attention, or positions behind the table of angles are nothing
    that a program can take."""
    model = load(tmp_path, "llama")
    program = fuse_for_cpu(model.module, 8, 30).forward.program
    assert not program.fits(lambda call: call.query)
    for attention, fits in (("reference", False), ("cpu", True)):
        meta = build_metadata(rows_of([(0, 3)]), BLOCK_SIZE)
        assert program.fits(PagedStep(caches_of(model, attention), meta)) is fits
    meta = build_metadata(rows_of([(100, 1)]), BLOCK_SIZE)
    assert not program.fits(PagedStep(caches_of(model, "cpu"), meta))
