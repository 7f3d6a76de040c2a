"""The FlashInfer library's kernels behind our attention function, chosen by option ``attention``.

Imported only where the library is installed (``attention.select``). It plans each step on the host:
lengths are copied back from the device once per step and kind of layer, so it runs without CUDA
graphs. Our cache is its layout HND, [pages, KV heads, page size, head size], as a pair of tensors.
"""

from dataclasses import dataclass
from typing import Any

import flashinfer  # type: ignore[import-not-found, import-untyped, unused-ignore]
import torch
from torch import Tensor

from jitney.errors import ConfigError
from jitney.execution.attention.metadata import AttentionMetadata
from jitney.execution.attention.reference import write

_HEAD_SIZES = (64, 128, 256)
_DTYPES = (torch.bfloat16, torch.float16)
_WORKSPACE_BYTES = 128 << 20


def why_not(
    device: torch.device, dtype: torch.dtype, head_size: int, num_heads: int, num_kv_heads: int
) -> str | None:
    """Why it cannot run, or None if it can. ``dtype`` is the cache's."""
    if device.type != "cuda":
        return f"FlashInfer needs a CUDA device, not {device.type}"
    if dtype not in _DTYPES:
        name = str(dtype).removeprefix("torch.")
        return f"FlashInfer is used with caches of bfloat16 and float16, not {name}"
    if head_size not in _HEAD_SIZES:
        return f"FlashInfer has head sizes 64, 128 and 256, not {head_size}"
    if num_heads % num_kv_heads:
        return f"{num_heads} query heads do not divide into groups of {num_kv_heads} KV heads"
    return None


@dataclass(slots=True)
class _Pages:
    """A step's block tables as FlashInfer reads them."""

    query_start: Tensor
    """int32 [R + 1], on the host, as the next and the last."""
    page_start: Tensor
    """int32 [R + 1]: row r's pages are [page_start[r], page_start[r + 1]) of ``pages``."""
    pages: Tensor
    """int32, on the device."""
    last_page_len: Tensor
    """int32 [R]: tokens in each row's last page."""


class FlashInferAttention:
    """The attention function ``flashinfer``; see :class:`attention.AttentionFunction`."""

    name = "flashinfer"

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._dtype = dtype
        # Some of its kernels count in there, from 0.
        self._workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        # A wrapper holds one plan: each kind of layer and of step has its own.
        self._wrappers: dict[tuple[object, ...], Any] = {}

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        meta: AttentionMetadata,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Write K and V to their slots, then attend in the cache's dtype.

        Raises ConfigError for a model with sinks: the load's first pass meets it.
        """
        if sinks is not None:
            raise ConfigError("option attention is 'flashinfer', but this model has sinks")
        write(k, key_cache, meta, None)
        write(v, value_cache, meta, None)
        heads, kv_heads, head_size = q.shape[1], k.shape[1], q.shape[2]
        one_each = meta.max_query_len == 1
        kind = (one_each, heads, kv_heads, head_size, scale, window, softcap)
        wrapper: Any = meta.plans.get((self, kind))
        if wrapper is None:
            wrapper = self._wrappers.get(kind)
            if wrapper is None:
                wrapper = self._wrappers[kind] = self._wrapper(one_each)
            self._plan(wrapper, meta, kind)
            meta.plans[self, kind] = wrapper
        asked = q.dtype
        out: Tensor = wrapper.run(q.to(self._dtype).contiguous(), (key_cache, value_cache))
        return out.to(asked)

    def _wrapper(self, one_each: bool) -> Any:
        if one_each:
            return flashinfer.BatchDecodeWithPagedKVCacheWrapper(
                self._workspace, "HND", use_tensor_cores=True
            )
        return flashinfer.BatchPrefillWithPagedKVCacheWrapper(self._workspace, "HND")

    def _plan(self, wrapper: Any, meta: AttentionMetadata, kind: tuple[Any, ...]) -> None:
        one_each, heads, kv_heads, head_size, scale, window, softcap = kind
        pages = meta.plans.get((self, "pages"))
        if pages is None:
            pages = meta.plans[self, "pages"] = _pages(meta)
        assert isinstance(pages, _Pages)
        tables = (pages.page_start, pages.pages, pages.last_page_len)
        options = {
            "sm_scale": scale,
            "window_left": -1 if window is None else window - 1,  # keys before the query's own
            "logits_soft_cap": softcap or 0.0,
            "q_data_type": self._dtype,
            "kv_data_type": self._dtype,
        }
        shape = (heads, kv_heads, head_size, meta.block_size)
        if one_each:
            wrapper.plan(*tables, *shape, **options)
        else:
            wrapper.plan(pages.query_start, *tables, *shape, causal=True, **options)


def _pages(meta: AttentionMetadata) -> _Pages:
    context = meta.context_len.cpu()
    counts = torch.div(context + meta.block_size - 1, meta.block_size, rounding_mode="floor")
    start = torch.zeros(len(context) + 1, dtype=torch.int32)
    torch.cumsum(counts, 0, out=start[1:])
    rows = torch.repeat_interleave(torch.arange(len(context)), counts)
    columns = torch.arange(int(start[-1])) - start[:-1][rows]
    device = meta.block_table.device
    return _Pages(
        query_start=meta.query_start.cpu(),
        page_start=start,
        pages=meta.block_table[rows.to(device), columns.to(device)].int(),
        last_page_len=(context - (counts - 1) * meta.block_size).int(),
    )
