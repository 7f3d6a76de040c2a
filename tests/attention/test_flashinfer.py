"""The adapter of FlashInfer over a small stand-in for the library, which has the same calls and
attends in torch over the pages that it was planned with. The library itself needs a GPU."""

import importlib
import sys
import types

import pytest
import torch
from jitney.errors import ConfigError
from jitney.execution import attention
from jitney.execution.attention import build_metadata
from jitney.execution.attention.reference import ReferenceAttention

from tests.attention.rows import row

HEADS, KV_HEADS, SIZE, BLOCK = 4, 2, 64, 16
CUDA = torch.device("cuda")
planned: list[str] = []


class _Wrapper:
    """What both wrappers share; float32 sums."""

    def __init__(self, workspace, kv_layout, **options) -> None:
        assert workspace.dtype == torch.uint8
        assert kv_layout == "HND"

    def note(self, start, pages, last, heads, kv_heads, size, page, **options) -> None:
        assert start.device.type == last.device.type == "cpu"
        assert (heads, kv_heads, size, page) == (HEADS, KV_HEADS, SIZE, BLOCK)
        assert options["q_data_type"] == options["kv_data_type"]
        self.tables, self.options = (start.tolist(), pages.tolist(), last.tolist()), options
        planned.append(type(self).__name__)

    def run(self, q, caches):
        start, pages, last = self.tables
        out = torch.zeros_like(q)
        for r, length in enumerate(last):
            keys, values = (
                cache[pages[start[r] : start[r + 1]]].transpose(1, 2).flatten(0, 1).float()
                for cache in caches
            )
            context = (start[r + 1] - start[r] - 1) * BLOCK + length
            begin, end = self.queries[r], self.queries[r + 1]
            for i in range(begin, end):
                position = context - (end - i)
                left = self.options["window_left"]
                first = 0 if left < 0 else max(0, position - left)
                for h in range(HEADS):
                    kv = h // (HEADS // KV_HEADS)
                    scores = keys[first : position + 1, kv] @ q[i, h].float()
                    scores *= self.options["sm_scale"]
                    if cap := self.options["logits_soft_cap"]:
                        scores = cap * torch.tanh(scores / cap)
                    out[i, h] = torch.softmax(scores, 0) @ values[first : position + 1, kv]
        return out


class BatchDecodeWithPagedKVCacheWrapper(_Wrapper):
    def plan(self, indptr, indices, last_page_len, *shape, **options) -> None:
        self.queries = list(range(len(last_page_len) + 1))
        self.note(indptr, indices, last_page_len, *shape, **options)


class BatchPrefillWithPagedKVCacheWrapper(_Wrapper):
    def plan(self, qo_indptr, indptr, indices, last_page_len, *shape, causal, **options) -> None:
        assert causal
        self.queries = qo_indptr.tolist()
        self.note(indptr, indices, last_page_len, *shape, **options)


@pytest.fixture
def adapter(monkeypatch):
    """The adapter's module, imported over the stand-in."""
    library = types.ModuleType("flashinfer")
    for wrapper in (BatchDecodeWithPagedKVCacheWrapper, BatchPrefillWithPagedKVCacheWrapper):
        setattr(library, wrapper.__name__, wrapper)
    monkeypatch.setitem(sys.modules, "flashinfer", library)
    name = "jitney.execution.attention.flashinfer"
    monkeypatch.delitem(sys.modules, name, raising=False)
    planned.clear()
    yield importlib.import_module(name)
    sys.modules.pop(name, None)


@pytest.mark.parametrize(("window", "softcap"), [(None, None), (7, None), (None, 2.0), (1, 1.0)])
def test_adapter_equals_reference(adapter, window, softcap):
    generator = torch.Generator().manual_seed(0)
    attend = adapter.FlashInferAttention(torch.device("cpu"), torch.bfloat16)
    tables = [[7, 2, 5], [3, 6], [1]]
    caches = [torch.zeros(8, KV_HEADS, BLOCK, SIZE, dtype=torch.bfloat16) for _ in range(4)]
    for spans in (
        [(0, 0, 30), (1, 0, 16), (2, 0, 1)],
        [(2, 1, 4), (0, 30, 31)],
        [(1, 16, 17), (0, 31, 32), (2, 4, 5)],
    ):
        meta = build_metadata([row(tables[i], a, b) for i, a, b in spans], BLOCK)
        total = sum(b - a for _, a, b in spans)
        for _ in range(2):  # two layers of a kind
            q, k, v = (
                torch.randn(total, n, SIZE, generator=generator).bfloat16()
                for n in (HEADS, KV_HEADS, KV_HEADS)
            )
            options = {"scale": 0.2, "window": window, "softcap": softcap}
            out = attend(q, k, v, *caches[:2], meta, **options)
            expected = ReferenceAttention()(q, k, v, *caches[2:], meta, **options)
            assert out.dtype == torch.bfloat16
            assert (out.double() - expected.double()).norm() / expected.double().norm() < 5e-3
    assert planned == [
        "BatchPrefillWithPagedKVCacheWrapper",
        "BatchPrefillWithPagedKVCacheWrapper",
        "BatchDecodeWithPagedKVCacheWrapper",
    ], "once per step, not per layer"


def test_what_it_cannot_do_is_refused(adapter):
    def refusal(**other) -> str:
        shape = {"head_size": 64, "num_heads": 4, "num_kv_heads": 2, **other}
        device = shape.pop("device", CUDA)
        dtype = shape.pop("dtype", torch.bfloat16)
        with pytest.raises(ConfigError) as error:
            attention.select("flashinfer", device, dtype, **shape)
        return str(error.value)

    assert "CUDA device, not cpu" in refusal(device=torch.device("cpu"))
    assert "float8_e4m3fn" in refusal(dtype=torch.float8_e4m3fn)
    assert "head sizes 64, 128 and 256, not 80" in refusal(head_size=80)
    assert "5 query heads" in refusal(num_heads=5)
    assert "batch_invariant" in refusal(batch_invariant=True)
    attend = adapter.FlashInferAttention(torch.device("cpu"), torch.bfloat16)
    with pytest.raises(ConfigError, match="sinks"):
        attend(*[None] * 6, scale=1.0, sinks=torch.zeros(4))


def test_without_the_library(monkeypatch):
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    monkeypatch.delitem(sys.modules, "jitney.execution.attention.flashinfer", raising=False)
    with pytest.raises(ConfigError, match="flashinfer-python"):
        attention.select("flashinfer", CUDA, torch.bfloat16, 64, 4, 2)
