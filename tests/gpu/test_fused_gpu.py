"""Fused modules on a GPU: parity, CUDA graphs, bitwise invariance of the batch.

Run on a machine with an NVIDIA GPU and a CUDA build of torch: ``pytest tests/gpu -m gpu``.
"""

import gc
from typing import Any

import pytest
import torch
from jitney.config import make_config
from jitney.execution.attention import build_metadata
from jitney.execution.interface import PagedStep, forward
from jitney.execution.linear import relative_error
from jitney.execution.memory import make_layer_caches
from jitney.execution.models import LoadedModel, load_model
from jitney.execution.probe import probe_logits
from jitney.request import Row
from jitney.sampling_params import SamplingParams
from torch import Tensor

from tests.tiny_models import ARCHITECTURES, VOCAB_SIZE, make_checkpoint

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
BLOCK = 16
TOLERANCE = {"float32": 1e-5, "bfloat16": 4e-2}
WHOLE = sorted(set(ARCHITECTURES) - {"gemma3n", "gpt_neox", "gpt2"})
# Heads that the kernels of attention have tiles for.
SHAPE = {"head_dim": 64, "hidden_size": 256, "intermediate_size": 512}


def load(tmp_path, name: str, dtype: str, **more: Any) -> tuple[LoadedModel, Any]:
    path = make_checkpoint(tmp_path, name, **SHAPE)
    options = {"model": str(path), "dtype": dtype, "device": "cuda"}
    return load_model(make_config(options)), make_config({**options, "attention": "gpu", **more})


def fuse(loaded: LoadedModel, config: Any):
    from jitney.execution.gpu.fuse import fuse_for_gpu

    return fuse_for_gpu(loaded.module, config)


class Sequences:
    """Some sequences of one model over caches of their own, each in its own blocks."""

    def __init__(self, loaded: LoadedModel, config: Any, count: int, length: int) -> None:
        self.module, self.count, self.length = loaded.module, count, length
        self.blocks = -(-length // BLOCK)
        self.caches = make_layer_caches(
            loaded.layers, count * self.blocks, BLOCK, loaded.dtype, loaded.device, "gpu",
            batch_invariant=config.batch_invariant,
        )  # fmt: skip
        generator = torch.Generator().manual_seed(0)
        self.tokens = torch.randint(3, VOCAB_SIZE, (count, length), generator=generator).tolist()

    def row(self, i: int, start: int, end: int) -> Row:
        table = list(range(i * self.blocks, (i + 1) * self.blocks))
        return Row(
            key=i, index=0, token_ids=self.tokens[i][start:end], start=start, block_table=table,
            sample=(), params=SamplingParams(), prompt=self.tokens[i], output=[],
            stop_ids=frozenset(), bad_words_ids=[],
        )  # fmt: skip

    def step(self, spans: list[tuple[int, int, int]]) -> Tensor:
        """Logits of all tokens of (sequence, start, end)."""
        rows = [self.row(*span) for span in spans]
        meta = build_metadata(rows, BLOCK, "cuda")
        ids = torch.tensor([t for row in rows for t in row.token_ids], device="cuda")
        wanted = torch.arange(len(ids), device="cuda")
        return forward(self.module, ids, meta.positions, wanted, PagedStep(self.caches, meta))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", sorted(ARCHITECTURES))
def test_parity(tmp_path, name: str, dtype: str) -> None:
    """Two sequences in chunks over a paged cache give what they gave before, in plain torch."""
    loaded, config = load(tmp_path, name, dtype)
    before = probe_logits(loaded.module, loaded.layers)
    assert fuse(loaded, config).whole == (name in WHOLE)
    after = probe_logits(loaded.module, loaded.layers, "gpu", BLOCK)
    assert relative_error(after, before) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3", "olmo2"])
@pytest.mark.parametrize("invariant", [False, True])
def test_a_decode_step_can_be_captured(tmp_path, name: str, dtype: str, invariant: bool) -> None:
    """A graph replayed over other ids gives what the kernels give one by one: nothing waited for
    the host, and nothing was baked in."""
    loaded, config = load(tmp_path, name, dtype, batch_invariant=invariant)
    fuse(loaded, config)
    count, length = 5, 24
    sequences = Sequences(loaded, config, count, length)
    sequences.step([(i, 0, length - 1) for i in range(count)])
    rows = [sequences.row(i, length - 1, length) for i in range(count)]
    meta = build_metadata(rows, BLOCK, "cuda")
    paged = PagedStep(sequences.caches, meta)
    ids = torch.tensor([row.token_ids[0] for row in rows], device="cuda")
    wanted = torch.arange(count, device="cuda")

    def run() -> Tensor:
        return forward(sequences.module, ids, meta.positions, wanted, paged)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        captured = run()
    for shift in (0, 7):
        ids.copy_((ids + shift) % VOCAB_SIZE)
        captured.fill_(float("nan"))
        graph.replay()
        assert torch.equal(captured, run())


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2"])
def test_bitwise_the_same_in_every_batch(tmp_path, name: str, dtype: str, fused: bool) -> None:
    """A sequence alone, among 63 others, in chunks and token by token."""
    loaded, config = load(tmp_path, name, dtype, batch_invariant=True, fuse=fused)
    fuse(loaded, config)
    count, length, mine = 64, 100, 17
    sequences = Sequences(loaded, config, count, length)
    alone = sequences.step([(mine, 0, length)])

    together = sequences.step([(i, 0, length) for i in range(count)])
    assert torch.equal(together[mine * length : (mine + 1) * length], alone)
    parts = []
    for start, end in ((0, 33), (33, 34), (34, 35), (35, 96), (96, length)):
        others = [(i, min(start, i), min(start, i) + 1) for i in range(count) if i != mine]
        logits = sequences.step([*others[:mine], (mine, start, end), *others[mine:]])
        parts.append(logits[mine : mine + end - start])
    assert torch.equal(torch.cat(parts), alone)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("outputs", "inputs"), [(28672, 4096), (4096, 14336), (160, 100)])
def test_products_of_fixed_tiles(outputs: int, inputs: int, dtype: torch.dtype) -> None:
    """Right, and bitwise the same for a row whatever the number of rows and its place in them."""
    from jitney.execution.gpu.products import InvariantLinear

    generator = torch.Generator("cuda").manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device="cuda").to(dtype)

    linear = InvariantLinear(draw(outputs, inputs) / inputs**0.5, draw(outputs))
    x = draw(300, inputs)
    together = linear(x)
    right = x.double() @ linear.weight.double().T + linear.bias.double()
    limit = {torch.float32: 2e-6, torch.bfloat16: 3e-3, torch.float16: 4e-4}[dtype]
    assert float((together.double() - right).norm() / right.norm()) < limit
    for first, last in ((0, 1), (63, 65), (127, 300), (299, 300), (1, 257)):
        assert torch.equal(linear(x[first:last]), together[first:last])


def test_norms_and_gates_on_the_device() -> None:
    """Against float64, and each row on its own, in the widths of real models."""
    from jitney.execution.gpu.norm import RmsNorm, add_norm, gate
    from jitney.execution.structure import NormForm

    for width in (4096, 5120, 16384, 20480):
        x, residual = (torch.randn(257, width, device="cuda").bfloat16() for _ in range(2))
        norm = RmsNorm(NormForm(torch.rand(width, device="cuda") + 0.5, 1e-5))
        out, sums = add_norm(x, residual, norm=norm)
        total = x.double() + residual.double()
        assert float((sums.double() - total).norm() / total.norm()) < 3e-3
        wide = sums.double()
        right = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5) * norm.scale
        assert float((out.double() - right).norm() / right.norm()) < 3e-3
        alone, _ = add_norm(x[100:101], residual[100:101], norm=norm)
        assert torch.equal(alone, out[100:101])
    x = torch.randn(70_000, 2 * 96, device="cuda").bfloat16()  # more rows than a grid's other axes
    left, right = x.double().chunk(2, -1)
    expected = torch.nn.functional.silu(left) * right
    assert float((gate(x, "silu").double() - expected).norm() / expected.norm()) < 3e-3


def test_merged_weights_are_not_kept_twice(tmp_path) -> None:
    """Neither in tensors nor in what the allocator holds back."""
    path = make_checkpoint(
        tmp_path, "llama", hidden_size=2048, intermediate_size=8192, num_hidden_layers=4,
        num_attention_heads=32, num_key_value_heads=8, head_dim=64, dtype=torch.bfloat16,
        max_shard_size="2GB",
    )  # fmt: skip
    config = make_config({"model": str(path), "dtype": "bfloat16", "device": "cuda"})
    loaded = load_model(config)
    gc.collect()
    torch.cuda.empty_cache()
    before, held = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    torch.cuda.reset_peak_memory_stats()
    assert fuse(loaded, config).whole
    layer = before // 4
    gc.collect()
    assert torch.cuda.memory_allocated() < before + (16 << 20)
    assert torch.cuda.memory_reserved() < held + (64 << 20)
    assert torch.cuda.max_memory_allocated() < before + 2 * layer
