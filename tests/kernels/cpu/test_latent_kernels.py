"""The kernels of attention over latents, against the same in plain torch; and a model that has such
attention, as one native call."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from jitney.engine.assemble import load_model
from jitney.execution.attention import build_metadata
from jitney.execution.interface import LayerCache, LoadedModel, PagedStep, forward_module
from jitney.execution.latents import LatentAttention
from jitney.execution.memory import make_layer_caches
from jitney.kernels.fused import rotary
from jitney.kernels.fused.forms import LatentForm, Misfit, NormForm
from jitney.kernels.fused.fuse import fuse
from jitney.kernels.fused.trial import relative_error
from jitney.read_config import make_config
from torch import Tensor

from tests.execution.like_generate import make_type
from tests.kernels.cpu.test_program import BLOCK_SIZE, BLOCKS_PER_ROW, STEPS, rows_of, run

pytest.importorskip("numba")

from jitney.kernels.cpu import latent_layer
from jitney.kernels.cpu.attention_kernel import TAGS
from jitney.kernels.cpu.compiled import Kernel
from jitney.kernels.cpu.latent_layer import CpuLatentLayer
from jitney.kernels.cpu.layer_kernels import CpuLayerKernels
from jitney.kernels.cpu.norm_rotary_kernel import norm_rotary_body
from jitney.kernels.cpu.program import LayerProgram

RANK = 32
ROTARY = 8
KEY = 24
VALUE = 16
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
MODEL = {
    "num_key_value_heads": 4,
    "head_dim": None,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "first_k_dense_replace": 2,
}
"""As one native call: sizes of whole columns, and no experts."""


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(before)


def make_layer(
    dtype: torch.dtype, heads: int, window: int | None = None, rank: int = RANK
) -> CpuLatentLayer:
    latents: Any = SimpleNamespace(
        rank=rank,
        rotary_size=ROTARY,
        value_size=VALUE,
        key_up=torch.randn(heads, KEY, rank).to(dtype) / 4,
        value_up=torch.randn(heads, rank, VALUE).to(dtype) / 4,
    )
    form = LatentForm(
        layer=0,
        heads=heads,
        key_size=KEY,
        scale=0.3,
        window=window,
        latents=latents,
        norm=NormForm(torch.ones(rank), 1e-6),
    )
    tag = TAGS[dtype]
    return CpuLatentLayer(form, dtype, Kernel(lambda address: norm_rotary_body(tag, address)))


def make_cache(dtype: torch.dtype) -> LayerCache:
    keys = torch.zeros(3 * BLOCKS_PER_ROW, 1, BLOCK_SIZE, 48, dtype=dtype)
    return LayerCache(keys, keys[..., :0], LatentAttention())


def latents(model: LoadedModel) -> list[LayerCache]:
    """Empty caches of a model."""
    blocks = 3 * BLOCKS_PER_ROW
    functions = [LatentAttention()] * len(model.layers)
    return make_layer_caches(
        model.layers, functions, BLOCK_SIZE, torch.bfloat16, model.device, blocks
    )


def tokens_of(count: int, dtype: torch.dtype, heads: int) -> tuple[Tensor, Tensor]:
    """Queries and latents, the same ones for the same token numbers."""
    query = [torch.randn(heads * (KEY + ROTARY)) for _ in range(count)]
    latent = [torch.randn(RANK + ROTARY) for _ in range(count)]
    return torch.stack(query).to(dtype), torch.stack(latent).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("heads", "window"), [(4, None), (20, None), (16, 11)], ids=["few", "two groups", "window"]
)
def test_it_attends_as_plain_torch(monkeypatch, heads: int, window: Any, dtype: Any) -> None:
    """Rows of any length, in slices, at any age."""
    monkeypatch.setattr(latent_layer, "SLICE_TOKENS", 20)
    layer = make_layer(dtype, heads, window)
    cache = make_cache(dtype)
    other_cache = make_cache(dtype)
    angles = torch.zeros(0)
    for spec in STEPS:
        meta = build_metadata(rows_of(spec), BLOCK_SIZE)
        count = len(meta.positions)
        query, latent = tokens_of(count, dtype, heads)
        angles = torch.rand(count, ROTARY).to(dtype)
        call = layer.form.call(query, latent)
        # These change query and latent in place, and ``call`` with them.
        got = layer(query, latent, angles, angles, PagedStep([cache], meta))
        right = cache.attend(call, other_cache, meta)
        assert relative_error(got, right) <= TOLERANCE[dtype]
    assert torch.equal(cache.keys, other_cache.keys)


def test_a_result_has_the_same_bits_however_a_prompt_is_cut() -> None:
    layer = make_layer(torch.bfloat16, heads=4)
    query, latent = tokens_of(23, torch.bfloat16, heads=4)
    ones = torch.ones(23, ROTARY, dtype=torch.bfloat16)
    results = []
    for cuts in ([23], [9, 14], [1] * 23):
        cache = make_cache(torch.bfloat16)
        parts = []
        first = 0
        for tokens in cuts:
            last = first + tokens
            meta = build_metadata(rows_of([(first, tokens)]), BLOCK_SIZE)
            step = PagedStep([cache], meta)
            cos = ones[first:last]
            own = (query[first:last].clone(), latent[first:last].clone())
            parts.append(layer(*own, cos, 0 * cos, step))
            first = last
        results.append(torch.cat(parts))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_another_cache_is_left_to_its_own_function() -> None:
    """One of other numbers, say."""
    layer = make_layer(torch.bfloat16, heads=4)
    assert layer.fits(make_cache(torch.bfloat16))
    assert not layer.fits(make_cache(torch.float32))


def test_latents_that_no_kernel_has_memory_for_are_refused() -> None:
    with pytest.raises(Misfit, match="more than 1024"):
        make_layer(torch.float32, heads=1, rank=1024)


@pytest.mark.parametrize("low_rank", [32, 64])
def test_one_call_gives_the_same_bits(tmp_path, low_rank: int) -> None:
    """As kernel by kernel; and close to the module before it was fused."""
    folder = make_type(tmp_path, "deepseek_v3", **MODEL, q_lora_rank=low_rank)
    model = load_model(make_config({"model": str(folder), "dtype": "bfloat16", "device": "cpu"}))
    plain = run(lambda *step: forward_module(model.module, *step), model, caches=latents(model))
    fused = fuse(model.module, CpuLayerKernels(torch.bfloat16, 8), 256).forward
    assert fused is not None
    assert isinstance(fused.program, LayerProgram)
    program = run(fused, model, caches=latents(model))
    fused.program = None
    assert torch.equal(program, run(fused, model, caches=latents(model)))
    assert relative_error(program, plain) < 5e-2


def test_a_short_table_of_angles_changes_no_bit(tmp_path, monkeypatch) -> None:
    """Queries and latents have kernels of their own that rotate."""
    folder = make_type(tmp_path, "deepseek_v3", **MODEL, q_lora_rank=32)
    options = make_config({"model": str(folder), "dtype": "bfloat16", "device": "cpu"})
    results = []
    for most_bytes in (rotary.MOST_TABLE_BYTES, 1000):
        monkeypatch.setattr(rotary, "MOST_TABLE_BYTES", most_bytes)
        model = load_model(options)
        fused = fuse(model.module, CpuLayerKernels(torch.bfloat16, 8), 256).forward
        assert fused is not None
        assert isinstance(fused.program, LayerProgram)
        assert fused.tables[0].is_whole == (most_bytes > 1000)
        results.append(run(fused, model, caches=latents(model)))
    assert torch.equal(*results)


def test_a_cache_of_other_numbers_runs_kernel_by_kernel(tmp_path) -> None:
    folder = make_type(tmp_path, "deepseek_v3", **MODEL, q_lora_rank=32)
    model = load_model(make_config({"model": str(folder), "dtype": "bfloat16", "device": "cpu"}))
    fused = fuse(model.module, CpuLayerKernels(torch.bfloat16, 8), 256).forward
    assert fused is not None
    assert isinstance(fused.program, LayerProgram)
    meta = build_metadata(rows_of([(0, 3)]), BLOCK_SIZE)
    caches = latents(model)
    assert fused.program.can_run(PagedStep(caches, meta))
    wide = [cache._replace(keys=cache.keys.float()) for cache in caches]
    assert not fused.program.can_run(PagedStep(wide, meta))
