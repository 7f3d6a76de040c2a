"""No kernel of attention, norms or products is compiled while requests are served: what a first
prompt and a first decode have compiled does for every later step; so does what a first adapter has.
The interpreter's launches are recorded, not run, and their arguments told apart as the compiler of
compute capability 9.0 does."""

from typing import Any

import pytest
import torch

pytest.importorskip("triton")
from jitney.execution.attention import AttentionMetadata, cache_shape
from jitney.execution.interface import AttentionCall, LayerCache
from jitney.execution.low_rank import AdapterSpan, Factors, LowRank, Part
from jitney.kernels.fused.forms import NormForm
from jitney.kernels.fused.rotary import rotary_table
from jitney.kernels.gpu.adapter_products import GroupedProducts
from jitney.kernels.gpu.gpu_attention import GpuAttention, HeadTransform
from jitney.kernels.gpu.invariant_product import InvariantLinear
from jitney.kernels.gpu.norm_kernels import add_norm, gate
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction, create_function_from_signature

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels are not interpreted")
BLOCK = 16


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> set[tuple[str, str]]:
    """(kernel, specialized arguments and options) of all launches and warm-ups."""
    backend, binders, found = make_backend(GPUTarget("cuda", 90, 32)), {}, set()

    def run(self: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
        if self not in binders:
            kernel = JITFunction(self.fn, **self.kwargs)
            binders[self] = create_function_from_signature(kernel.signature, kernel.params, backend)
        _, arguments_as_seen, others = binders[self](*arguments, **options)
        found.add((self.fn.__name__, str((arguments_as_seen, others))))

    monkeypatch.setattr(InterpretedFunction, "run", run)
    return found


class Layer:
    """The kernels of a decoder layer, and of the last norm, in bfloat16."""

    def __init__(self, heads: int, kv_heads: int, size: int, rotary: int, **options: Any) -> None:
        window, invariant = options.pop("window", None), options.pop("batch_invariant", False)
        cache_dtype = options.pop("cache_dtype", torch.bfloat16)
        self.attend = GpuAttention(
            torch.device("cpu"), cache_dtype, size, heads, kv_heads, batch_invariant=invariant
        )
        self.window, self.size, self.heads = window, size, (heads, kv_heads, kv_heads)
        shape = cache_shape(2, BLOCK, kv_heads, size)
        self.caches = [torch.zeros(shape, dtype=cache_dtype) for _ in "kv"]
        self.scales: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None)

        def no_angles(
            x: torch.Tensor, positions: torch.Tensor
        ) -> tuple[torch.Tensor, torch.Tensor]:
            zeros = torch.zeros((1, positions.shape[1], rotary), dtype=torch.bfloat16)
            return zeros, zeros

        table = rotary_table(no_angles, "halves", "halves", length=10, like=torch.zeros(1))
        self.angles = table.angles
        self.norm = NormForm(torch.ones(heads * size), 1e-5)
        self.product = InvariantLinear(torch.zeros(64, heads * size, dtype=torch.bfloat16), None)
        # Static, as a runner's are.
        self.numbers = torch.zeros(700, dtype=torch.int32)
        self.slots = torch.zeros(700, dtype=torch.int64)
        self.table = torch.zeros((64, 5000 // BLOCK), dtype=torch.int32)

    def step(self, rows: int, tokens: int, context: int) -> None:
        meta = AttentionMetadata(
            query_start=self.numbers[: rows + 1],
            context_len=self.numbers[:rows],
            block_table=self.table[:rows, : -(-context // BLOCK)],
            last_block=0,
            slot_mapping=self.slots[:tokens],
            positions=self.slots[:tokens],
            block_size=BLOCK,
            max_query_len=tokens - rows + 1,
            max_context_len=context,
        )
        like = self.caches[0].new_zeros((), dtype=torch.bfloat16)
        qkv = like.new_zeros((tokens, sum(self.heads), self.size)).split(self.heads, 1)
        call = AttentionCall(0, *qkv, scale=0.1, window=self.window)
        transform = HeadTransform(*self.angles.index_select(0, self.slots[:tokens]).unbind(1))
        attended = self.attend(
            call, LayerCache(*self.caches, self.attend, *self.scales), meta, transform
        )
        branch = attended.view(tokens, -1)
        x, residual = add_norm(branch, branch, norm=self.norm)
        self.product(x)
        gate(like.new_zeros((tokens, 512)), "silu")
        add_norm(x, residual, norm=self.norm, indices=self.slots[tokens % 2 :][:rows])


@pytest.mark.parametrize(
    "layer",
    [
        {"heads": 32, "kv_heads": 8, "size": 128, "rotary": 128},
        {"heads": 9, "kv_heads": 3, "size": 64, "rotary": 64},
        {"heads": 14, "kv_heads": 2, "size": 64, "rotary": 64, "window": 512},
        {"heads": 8, "kv_heads": 8, "size": 80, "rotary": 20},
        {"heads": 28, "kv_heads": 4, "size": 128, "rotary": 128, "batch_invariant": True},
    ],
    ids=lambda layer: f"{layer['heads']}x{layer['size']}",
)
def test_nothing_is_compiled_after_a_prompt_and_a_decode(
    layer: dict[str, Any], compiled: set[tuple[str, str]]
) -> None:
    made = Layer(**layer)
    made.step(1, 16, 16)
    made.step(1, 1, 17)
    first = set(compiled)
    assert len([name for name, _ in first if name == "write_kernel"]) == 1
    assert {name for name, _ in first} >= {"attention_kernel", "reduction_kernel", "write_kernel"}
    for rows in (1, 2, 3, 5, 8, 16, 17, 32):
        for more in (0, 1, 2, 15, 16, 64):
            for context in (more + 1, 256, 511, 513, 1024, 4096):
                made.step(rows, rows + more, context)
    assert compiled == first


def test_scales_that_come_after_the_memory_was_measured_compile_nothing_later(
    compiled: set[tuple[str, str]],
) -> None:
    """The load measures steps over caches that have no scales yet."""
    made = Layer(32, 8, 64, 64, cache_dtype=torch.float8_e4m3fn)
    made.step(1, 16, 16)
    made.step(1, 1, 17)
    made.scales = (torch.ones(8), torch.ones(8))
    made.step(1, 16, 16)
    made.step(1, 1, 17)
    first = set(compiled)
    for rows in (1, 8, 32):
        for context in (256, 1024, 4096):
            made.step(rows, rows, context)
            made.step(rows, rows + 64, context)
    assert compiled == first


def test_adapters_of_other_ranks_compile_nothing(compiled: set[tuple[str, str]]) -> None:
    """A layer's first step with an adapter has compiled all: for its shape, and for every other
    layer of it."""
    columns = {"q": (0, 512), "k": (512, 640), "v": (640, 768)}
    qkv = [[Part(f"{n}{name}", *at) for name, at in columns.items()] for n in range(18)]
    down = [[Part(f"{n}down", 0, 256)] for n in range(18)]
    products = GroupedProducts([layer for pair in zip(qkv, down, strict=True) for layer in pair])

    def adapter(rank: int) -> LowRank:
        factors = {
            part.path: Factors(torch.zeros(rank, 256), torch.zeros(rank, part.last - part.first))
            for parts in (*qkv, *down)
            for part in parts
        }
        return LowRank("", factors, products.pack(factors))

    def step(layer: int, *spans: AdapterSpan) -> None:
        add = products.begin(spans)
        for parts in (qkv[layer], down[layer]):
            x = torch.zeros(spans[-1].last + 3, 256)
            add(parts, x, x.new_zeros(len(x), parts[-1].last))

    adapters = [adapter(rank) for rank in (1, 3, 8, 16, 17, 64, 256)]
    step(0, AdapterSpan(0, 1, adapters[0]))
    first = set(compiled)
    assert {name for name, _ in first} == {"shrink_kernel", "expand_kernel"}
    for layer in range(18):
        for tokens in (1, 2, 16, 33):
            for n, each in enumerate(adapters):
                other = AdapterSpan(tokens, tokens + n, adapters[layer % 7])
                step(layer, AdapterSpan(0, tokens, each), *([other] if n else []))
    assert compiled == first
