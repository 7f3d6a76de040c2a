"""No kernel of attention is compiled while requests are served: what a first prompt and a first
decode have compiled does for every later step. The interpreter's launches are recorded, not run,
and their arguments told apart as the compiler of compute capability 9.0 does."""

from typing import Any

import pytest
import torch

pytest.importorskip("triton")
from jitney.execution.attention import AttentionMetadata, cache_shape
from jitney.execution.interface import AttentionCall, LayerCache
from jitney.kernels.gpu.gpu_attention import GpuAttention
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
    """The attention of a decoder layer in bfloat16."""

    def __init__(self, heads: int, kv_heads: int, size: int, **options: Any) -> None:
        window, invariant = options.pop("window", None), options.pop("batch_invariant", False)
        self.attend = GpuAttention(
            torch.device("cpu"), torch.bfloat16, size, heads, kv_heads, batch_invariant=invariant
        )
        self.window, self.size, self.heads = window, size, (heads, kv_heads, kv_heads)
        shape = cache_shape(2, BLOCK, kv_heads, size)
        self.caches = [torch.zeros(shape, dtype=torch.bfloat16) for _ in "kv"]
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
        like = self.caches[0]
        qkv = like.new_zeros((tokens, sum(self.heads), self.size)).split(self.heads, 1)
        call = AttentionCall(0, *qkv, scale=0.1, window=self.window)
        self.attend(call, LayerCache(*self.caches, self.attend), meta)


@pytest.mark.parametrize(
    "layer",
    [
        {"heads": 32, "kv_heads": 8, "size": 128},
        {"heads": 9, "kv_heads": 3, "size": 64},
        {"heads": 14, "kv_heads": 2, "size": 64, "window": 512},
        {"heads": 8, "kv_heads": 8, "size": 80},
        {"heads": 28, "kv_heads": 4, "size": 128, "batch_invariant": True},
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
