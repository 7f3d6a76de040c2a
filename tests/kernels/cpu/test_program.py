"""A step's layers as one native call: the same bits as kernel by kernel."""

import pytest
import torch
from jitney.batch import Row
from jitney.engine.assemble import load_model
from jitney.execution.attention import build_metadata
from jitney.execution.interface import LayerCache, LoadedModel, PagedStep, forward_module
from jitney.execution.memory import make_layer_caches
from jitney.kernels.fused import rotary
from jitney.kernels.fused.fuse import fuse
from jitney.kernels.fused.trial import relative_error
from jitney.kernels.fused.whole_model import FusedForward
from jitney.quantization.eight_bits import Int8Linear
from jitney.quantization.four_bits import Int4Linear
from jitney.read_config import make_config
from jitney.sampling_params import SamplingParams

from tests.kernels.attention.choose import for_layers
from tests.tiny_models import VOCAB_SIZE, make_checkpoint

pytest.importorskip("numba")

from jitney.kernels.cpu import column_linear
from jitney.kernels.cpu.layer_kernels import CpuLayerKernels
from jitney.kernels.cpu.program import LayerProgram

BLOCK_SIZE = 16
BLOCKS_PER_ROW = 8


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


def run(step, model: LoadedModel, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Logits of the last token of every row of STEPS. ``dtype`` is the cache's."""
    results, caches = [], caches_of(model, "cpu", dtype)
    for spec in STEPS:
        rows = rows_of(spec)
        meta = build_metadata(rows, BLOCK_SIZE)
        ids = torch.tensor([token for row in rows for token in row.token_ids])
        last = meta.query_start[1:].long() - 1
        with torch.inference_mode():
            results.append(step(ids, meta.positions, last, PagedStep(caches, meta)).clone())
    return torch.cat(results)


def load(tmp_path, name: str, quantization: str = "none") -> LoadedModel:
    options = {"model": str(make_checkpoint(tmp_path, name)), "dtype": "bfloat16", "device": "cpu"}
    return load_model(make_config({**options, "quantization": quantization}))


def caches_of(
    model: LoadedModel, attention: str, dtype: torch.dtype = torch.bfloat16
) -> list[LayerCache]:
    functions = for_layers(attention, model.layers, dtype, model.device, model_dtype=torch.bfloat16)
    blocks = 3 * BLOCKS_PER_ROW
    return make_layer_caches(model.layers, functions, BLOCK_SIZE, dtype, model.device, blocks)


@pytest.mark.parametrize(
    ("quantization", "dtype"),
    [("none", torch.bfloat16), ("int8", torch.bfloat16), ("none", torch.int8)],
    ids=str,
)
@pytest.mark.parametrize("tiles", [True, False])
@pytest.mark.parametrize(
    ("name", "threads"), [("llama", 2), ("mistral", 1), ("qwen2", 2), ("qwen3", 1)]
)
def test_one_call_gives_the_same_bits(
    tmp_path, monkeypatch, name: str, threads: int, tiles: bool, quantization: str,
    dtype: torch.dtype,
) -> None:  # fmt: skip
    """As kernel by kernel; and close to the module before it was fused."""
    if tiles and not column_linear.may_use_amx():
        pytest.skip("the processor has no tile unit")
    monkeypatch.setattr(column_linear, "may_use_amx", lambda: tiles)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        model = load(tmp_path, name, quantization)
        plain = run(lambda *step: forward_module(model.module, *step), model)
        fused = fuse(model.module, CpuLayerKernels(torch.bfloat16, 8), 256).forward
        assert isinstance(fused.program, LayerProgram)
        program = run(fused, model, dtype)
        fused.program = None
        assert torch.equal(program, run(fused, model, dtype))
        assert relative_error(program, plain) < 5e-2
    finally:
        torch.set_num_threads(before)


def test_products_of_several_kinds_are_one_call(tmp_path) -> None:
    """As in a GGUF file of Q4_K_M, where some layers have 4 bits and some 8."""
    model = load(tmp_path, "llama")
    first, second = model.module.model.layers
    kinds = {"q_proj": Int4Linear, "k_proj": Int4Linear, "v_proj": Int4Linear}
    quantize(first.self_attn, {**kinds, "o_proj": Int4Linear})
    quantize(first.mlp, {"gate_proj": Int4Linear, "up_proj": Int4Linear, "down_proj": Int8Linear})
    kinds = {"q_proj": Int8Linear, "k_proj": Int8Linear, "v_proj": Int8Linear}
    quantize(second.self_attn, {**kinds, "o_proj": Int4Linear})
    quantize(second.mlp, dict.fromkeys(("gate_proj", "up_proj", "down_proj"), Int4Linear))
    fused = fuse(model.module, CpuLayerKernels(torch.bfloat16, 8), 256).forward
    assert isinstance(fused.program, LayerProgram)
    program = run(fused, model)
    fused.program = None
    assert torch.equal(program, run(fused, model))


def quantize(parent: torch.nn.Module, kinds: dict[str, type]) -> None:
    for name, kind in kinds.items():
        setattr(parent, name, kind.quantized_from(getattr(parent, name).weight.detach(), None))


def test_layers_of_different_widths_run_kernel_by_kernel(tmp_path) -> None:
    """The memory of a program is as wide as its first layer."""
    model = load(tmp_path, "llama")
    mlp = model.module.model.layers[1].mlp
    size = mlp.gate_proj.in_features
    shapes = {"gate_proj": (320, size), "up_proj": (320, size), "down_proj": (size, 320)}
    for name, shape in shapes.items():
        linear = getattr(mlp, name)
        linear.weight = torch.nn.Parameter(torch.randn(*shape).bfloat16() * 0.1)
        linear.out_features, linear.in_features = shape
    fused = fuse(model.module, CpuLayerKernels(torch.bfloat16, 8), 256).forward
    assert fused.program is None
    assert fused.why_no_program == "its layers have different sizes or norms"


@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_all_rows_of_a_wide_head(tmp_path, monkeypatch, quantization: str) -> None:
    """The room beside the rows is enough for the head too, whose rows are widened where those of
    the layers are rounded to bytes."""
    monkeypatch.setattr(column_linear, "may_use_amx", lambda: False)
    model = load(tmp_path, "llama", quantization)
    program = fuse(model.module, CpuLayerKernels(torch.bfloat16, 8), 256).forward.program
    program.use_caches(caches_of(model, "cpu"))
    room = program._lay_out(64).activations.converted.numel()
    assert room >= 64 * program._head.converted_row_bytes


def test_a_load_says_why_a_step_is_no_native_call(tmp_path, caplog) -> None:
    """And what that costs. gpt-oss has experts of its own kind."""
    model = load(tmp_path, "gpt_oss")
    report = fuse(model.module, CpuLayerKernels(torch.bfloat16, 8), 256)
    assert report.forward.program is None
    report.applied(model)
    assert "no native call: its MLP is of another kind. At hidden size 256 such" in caplog.text


@pytest.mark.parametrize("name", ["llama", "gemma3"])  # one table, and two
def test_a_short_table_of_angles_changes_no_bit(tmp_path, monkeypatch, name: str) -> None:
    """Steps behind its end, and before, and behind it again."""
    whole = run(fuse_whole(load(tmp_path, name)), load(tmp_path, name))
    monkeypatch.setattr(rotary, "MOST_TABLE_BYTES", 3000)
    model = load(tmp_path, name)
    forward = fuse_whole(model)
    assert not any(table.is_whole for table in forward.tables)
    for _ in range(2):
        assert torch.equal(run(forward, model), whole)


def fuse_whole(model: LoadedModel) -> FusedForward:
    forward = fuse(model.module, CpuLayerKernels(torch.bfloat16, 8), 256).forward
    assert isinstance(forward.program, LayerProgram)
    return forward


def test_other_steps_run_kernel_by_kernel(tmp_path) -> None:
    """A recorder, the reference attention, or positions behind the table of angles are nothing
    that a program can take."""
    model = load(tmp_path, "llama")
    program = fuse(model.module, CpuLayerKernels(torch.bfloat16, 8), 30).forward.program
    assert not program.can_run(lambda call: call.query)
    for attention, fits in (("reference", False), ("cpu", True)):
        meta = build_metadata(rows_of([(0, 3)]), BLOCK_SIZE)
        assert program.can_run(PagedStep(caches_of(model, attention), meta)) is fits
    meta = build_metadata(rows_of([(100, 1)]), BLOCK_SIZE)
    assert not program.can_run(PagedStep(caches_of(model, "cpu"), meta))


def test_a_cache_is_more_than_its_keys(tmp_path) -> None:
    """With the same keys, but other values, the program writes to those; and with another attention
    function it does not run."""
    model = load(tmp_path, "llama")
    program = fuse(model.module, CpuLayerKernels(torch.bfloat16, 8), 256).forward.program
    meta = build_metadata(rows_of([(0, 3)]), BLOCK_SIZE)
    first = caches_of(model, "cpu")
    second = [cache._replace(values=torch.zeros_like(cache.values)) for cache in first]
    ids = torch.tensor([1, 2, 3])
    for caches in (first, second):
        with torch.inference_mode():
            program(ids, torch.tensor([2]), PagedStep(caches, meta))
    assert second[0].values.any()
    slow = caches_of(model, "reference")[0].attend
    third = [cache._replace(attend=slow) for cache in second]
    assert not program.can_run(PagedStep(third, meta))
