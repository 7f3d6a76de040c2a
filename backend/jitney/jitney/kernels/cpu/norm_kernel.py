"""The RMS norm and the rotary embedding of each row of a step, as a Numba kernel, and its calls.

A row holds heads side by side; a plain norm has one head, which is the whole row::

    | query head 0 | query head 1 | ... | key head 0 | ... | values (left alone) |
      norm, then rotate the first "rotary" elements of each head

Loops: items of some rows, rows, heads, vectors of 16 elements. A row is computed by one thread in a
fixed order, whatever the batch: it is read twice, from the first-level cache the second time.
Elements are float32 or bfloat16, told apart by the type of ``tag`` (``simd``); sums are float32.

Called by ``layer_kernels``, which makes :class:`RowNorm` and :class:`CpuHeadAttention` for fused
modules, and by ``program``, where the kernel is a step of its own.
"""

import numpy as np
import torch
from torch import Tensor

from jitney.execution.interface import PagedFunction
from jitney.kernels.cpu.compiled import Kernel, KernelCall, reader, record
from jitney.kernels.cpu.emit import LANES
from jitney.kernels.cpu.simd import (
    ONE,
    ZERO,
    element_bytes,
    fetch_add,
    fma,
    inner,
    lane_sum,
    load,
    load_as,
    load_f32,
    load_i64,
    load_one,
    splat,
    store_as,
    store_one,
)
from jitney.kernels.fused.forms import AttentionForm, Misfit, NormForm

_BYTES_PER_THREAD = 1 << 16
"""Below this, waking a second thread costs more than it saves."""
_ITEMS_PER_THREAD = 4
"""So that a thread that is held up does not hold up the others."""
_ROWS_PER_ITEM = 4
"""In a ``program``, whose threads are awake."""


@record
class RowsCall(KernelCall):
    """Arguments of :func:`rows_body`. Strides are in bytes.

    A row holds query heads, then key heads, then what is left alone. A plain norm has one head.
    """

    rows_per_item: int
    data: int
    index: int
    """Address of int64 [rows]: which rows of the data to take. 0: the first ones."""
    out: int
    """Its rows are as far apart as those of ``data``. It may be ``data``."""
    stride: int
    query_heads: int
    key_heads: int
    head_size: int
    query_scale: int
    """Address of float32 [head size], or [query heads, head size]. 0: there is no norm."""
    key_scale: int
    wide: int
    """1: a norm is over all heads of query, or of key, together."""
    epsilon: float
    rotary_size: int
    """So many elements of each head, the first ones, are rotated, in ``out``."""
    cos: int
    """[positions, rotary size] in the data's type."""
    sin: int
    angle_stride: int
    """Bytes from row to row of ``cos``, and of ``sin``."""
    positions: int
    """Address of int64 [rows]: which row of ``cos`` and ``sin`` each row takes. 0: row r takes row
    r."""


read_rows_call = reader(RowsCall)


@inner
def norm_row(tag, row, out, scale, width, epsilon):
    """out = row / sqrt(mean of squares + epsilon) * scale. ``out`` may be ``row``."""
    size = element_bytes(tag)
    # Two sums, so that one addition need not wait for the other.
    first = splat(ZERO)
    second = splat(ZERO)
    i = 0
    while i + 2 * LANES <= width:
        a = load_as(tag, row + i * size)
        b = load_as(tag, row + (i + LANES) * size)
        first = fma(a, a, first)
        second = fma(b, b, second)
        i += 2 * LANES
    total = lane_sum(first + second)
    while i < width:
        x = load_one(tag, row + i * size)
        total += x * x
        i += 1
    factor = ONE / np.sqrt(total / np.float32(width) + epsilon)
    i = 0
    while i + LANES <= width:
        x = load_as(tag, row + i * size) * splat(factor)
        store_as(tag, out + i * size, x * load(scale + i * 4))
        i += LANES
    while i < width:
        x = load_one(tag, row + i * size) * factor
        store_one(tag, out + i * size, x * load_f32(scale + i * 4))
        i += 1


@inner
def rotate_head(tag, head, cos, sin, rotary):
    """Rotate the pairs (i, i + rotary / 2) of a head's first elements, in place."""
    size = element_bytes(tag)
    half = rotary // 2
    low = head
    high = head + half * size
    i = 0
    while i + LANES <= half:
        at = i * size
        other = (half + i) * size
        a = load_as(tag, low + at)
        b = load_as(tag, high + at)
        first = a * load_as(tag, cos + at) - b * load_as(tag, sin + at)
        second = b * load_as(tag, cos + other) + a * load_as(tag, sin + other)
        store_as(tag, low + at, first)
        store_as(tag, high + at, second)
        i += LANES
    # What is left of a half that is no multiple of 16.
    while i < half:
        at = i * size
        other = (half + i) * size
        x = load_one(tag, low + at)
        y = load_one(tag, high + at)
        store_one(tag, low + at, x * load_one(tag, cos + at) - y * load_one(tag, sin + at))
        store_one(tag, high + at, y * load_one(tag, cos + other) + x * load_one(tag, sin + other))
        i += 1


@inner
def finish_heads(tag, call, row, out, heads, scale, angles):
    """Norm (if the address ``scale`` is not 0) and rotate so many heads, which lie side by side."""
    size = call.head_size * element_bytes(tag)
    if scale != 0 and call.wide != 0:
        norm_row(tag, row, out, scale, width=heads * call.head_size, epsilon=call.epsilon)
    for h in range(heads):
        head = out + h * size
        if scale != 0 and call.wide == 0:
            source = row + h * size
            norm_row(tag, source, head, scale, width=call.head_size, epsilon=call.epsilon)
        rotate_head(tag, head, call.cos + angles, call.sin + angles, call.rotary_size)


@inner
def rows_body(tag, arguments):
    """RMS norm (Zhang and Sennrich 2019) and rotary embedding (Su et al. 2021) of each row."""
    call = read_rows_call(arguments)
    key_offset = call.query_heads * call.head_size * element_bytes(tag)
    while True:
        first = fetch_add(arguments) * call.rows_per_item
        if first >= call.count:
            return
        for r in range(first, min(first + call.rows_per_item, call.count)):
            source = r if call.index == 0 else load_i64(call.index + 8 * r)
            row = call.data + source * call.stride
            out = call.out + r * call.stride
            position = r if call.positions == 0 else load_i64(call.positions + 8 * r)
            angles = position * call.angle_stride
            finish_heads(
                tag,
                call,
                row,
                out,
                heads=call.query_heads,
                scale=call.query_scale,
                angles=angles,
            )
            finish_heads(
                tag,
                call,
                row + key_offset,
                out + key_offset,
                heads=call.key_heads,
                scale=call.key_scale,
                angles=angles,
            )


# --------------------------------------------------------------------------- calls


class RowNorm:
    """The RMS norm of rows in the dtype of the model."""

    def __init__(self, form: NormForm, dtype: torch.dtype, kernel: Kernel) -> None:
        self.kernel = kernel
        self._form = form  # it owns the scale's memory
        self._dtype = dtype
        width = form.scale.numel()
        self._call = RowsCall(
            rows_per_item=_ROWS_PER_ITEM,
            stride=width * dtype.itemsize,
            query_heads=1,
            head_size=width,
            query_scale=form.scale.data_ptr(),
            epsilon=form.epsilon,
        )

    def __call__(self, x: Tensor) -> Tensor:
        """A new tensor; x is [..., width]."""
        assert x.dtype == self._dtype
        assert x.shape[-1] == self._call.head_size
        x = x.contiguous()
        out = torch.empty_like(x)
        call = self.call_for(x.data_ptr(), out.data_ptr())
        _run(self.kernel, call, rows=x.numel() // x.shape[-1], row_bytes=call.stride)
        return out

    def call_for(self, x: int, out: int, index: int = 0) -> RowsCall:
        """The kernel's arguments for contiguous rows at these addresses, but for their number."""
        call = RowsCall.from_buffer_copy(self._call)
        call.data = x
        call.out = out
        call.index = index
        return call


class CpuHeadAttention:
    """Norms of query and key heads if there are any, rotary embedding, attention."""

    def __init__(self, form: AttentionForm, dtype: torch.dtype, kernel: Kernel) -> None:
        self.form = form
        self.kernel = kernel
        self._dtype = dtype
        self._row_bytes = (form.query_heads + form.key_heads) * form.head_size * dtype.itemsize
        self._call = RowsCall(
            rows_per_item=_ROWS_PER_ITEM,
            query_heads=form.query_heads,
            key_heads=form.key_heads,
            head_size=form.head_size,
            wide=form.wide_norms,
        )
        if form.norms is not None:
            query, key = form.norms
            self._call.epsilon = query.epsilon
            self._call.query_scale = query.scale.data_ptr()
            self._call.key_scale = key.scale.data_ptr()

    def __call__(self, qkv: Tensor, cos: Tensor, sin: Tensor, paged: PagedFunction) -> Tensor:
        """See :data:`fused.forms.AttentionKernel`. All are in the dtype of the model."""
        self.rotate(qkv, cos, sin)
        return paged(self.form.call(*self.form.split(qkv)))

    def rotate(self, qkv: Tensor, cos: Tensor, sin: Tensor) -> None:
        """Norm and rotate query and key heads in place."""
        if cos.stride() != sin.stride() or cos.stride(1) != 1:
            cos = cos.contiguous()
            sin = sin.contiguous()
        call = self.call_for(qkv, cos, sin)
        _run(self.kernel, call, rows=qkv.shape[0], row_bytes=self._row_bytes)

    def call_for(self, qkv: Tensor, cos: Tensor, sin: Tensor, positions: int = 0) -> RowsCall:
        """The kernel's arguments, but for the number of rows. cos and sin have the same strides."""
        assert qkv.is_contiguous()
        if not cos.dtype == sin.dtype == qkv.dtype == self._dtype:
            raise Misfit("the angles of its rotary embedding are of another dtype")
        size = qkv.element_size()
        call = RowsCall.from_buffer_copy(self._call)
        call.data = qkv.data_ptr()
        call.out = qkv.data_ptr()
        call.stride = qkv.stride(0) * size
        call.cos = cos.data_ptr()
        call.sin = sin.data_ptr()
        call.angle_stride = cos.stride(0) * size
        call.positions = positions
        call.rotary_size = cos.shape[1]
        return call


def _run(kernel: Kernel, call: RowsCall, *, rows: int, row_bytes: int) -> None:
    """Run over so many rows, on as many threads as they are worth."""
    call.count = rows
    call.rows_per_item = rows
    threads = 1 + rows * row_bytes // _BYTES_PER_THREAD
    if threads > 1:
        threads = min(torch.get_num_threads(), threads, rows)
        call.rows_per_item = -(-rows // (_ITEMS_PER_THREAD * threads))
    kernel.run(call, threads)
