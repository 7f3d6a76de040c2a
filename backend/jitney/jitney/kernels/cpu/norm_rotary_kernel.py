"""The RMS norm and the rotary embedding of each row of a step, as a Numba kernel, and its calls.

A row is the heads of one token side by side, as the product of query, key and value gives them.
Each query head and each key head is normalised, if the model has such norms. Then the first
elements of the head, ``rotary_size`` of them, are rotated::

    | query head 0 | query head 1 | ... | key head 0 | ... | values (left alone) |
      norm, rotate   norm, rotate         norm, rotate

The norm of whole rows, before attention or an MLP, is the same with one query head, as wide as the
row, with no key heads and a ``rotary_size`` of 0.

Loops: items of some rows, rows, heads, vectors of 16 elements. A row is computed by one thread in a
fixed order, whatever the batch. It is read twice, from the first-level cache the second time.
Elements are float32 or bfloat16, told apart by the type of ``tag`` (``simd``); sums are float32.

Called by ``layer_kernels``, which makes :class:`RowNorm` and :class:`CpuAttentionLayer` for fused
modules, and by ``program``, where the kernel is a step of its own.
"""

import numpy as np
import torch
from torch import Tensor

from jitney.execution.interface import PagedFunction
from jitney.kernels.cpu.compiled import Kernel, KernelCall, reader, record
from jitney.kernels.cpu.emit import F32_BYTES, I64_BYTES, LANES, ceil_div
from jitney.kernels.cpu.gate_kernel import NORM_NONE, GateCall, compiled_gate
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
"""A call gets one more thread for so many bytes of rows. For less, waking a thread costs more time
than it saves."""
_ITEMS_PER_THREAD = 4
"""Items of a call for each of its threads: if one thread is held up, the others take its items."""
_ROWS_PER_ITEM = 4
"""Rows of an item in a ``program``, where all threads are awake."""


@record
class NormRotaryCall(KernelCall):
    """Arguments of :func:`norm_rotary_body`; ``count`` is in rows. Strides are in bytes."""

    rows_per_item: int
    data: int
    """Address of the rows that are read."""
    index: int
    """Address of int64 [count]: which row of the data is read for each row of the result. 0: there
    is no such list, and row r of the result is computed from row r of the data."""
    out: int
    """Address of the rows that are written. It may be ``data``."""
    stride: int
    """From row to row, of ``data`` and of ``out``."""
    query_heads: int
    key_heads: int
    head_size: int
    query_scale: int
    """Address of the weights of the query heads' norm: float32 [head_size], or, if
    ``one_norm_for_all_heads``, [query_heads * head_size]. 0: there is no norm."""
    key_scale: int
    """The same of the key heads' norm."""
    one_norm_for_all_heads: int
    """0: each head has a norm by itself, all with the same weights. 1: all query heads together
    have one norm, and so have all key heads."""
    epsilon: float
    rotary_size: int
    """How many elements of each head are rotated, in ``out``. 0: none."""
    rotary_offset: int
    """Bytes from a head's first element to the first one that is rotated."""
    cos: int
    """Address of [positions, rotary_size] in the data's type."""
    sin: int
    """The same."""
    angle_stride: int
    """From position to position, of ``cos`` and of ``sin``."""
    positions: int
    """Address of int64 [count]: which row of ``cos`` and ``sin`` each row takes. 0: there is no
    such list, and row r takes row r of these."""


read_norm_rotary = reader(NormRotaryCall)


# --------------------------------------------------------------------------- one row or head


@inner
def norm_row(tag, row, out, scale, width, epsilon):
    """out = row / sqrt(mean of squares + epsilon) * scale. ``out`` may be ``row``."""
    size = element_bytes(tag)
    # The sum of squares, two vectors at a time. There are two sums, so that an addition need not
    # wait for the one before it.
    first_sum = splat(ZERO)
    second_sum = splat(ZERO)
    i = 0
    while i + 2 * LANES <= width:
        first = load_as(tag, row + i * size)
        second = load_as(tag, row + (i + LANES) * size)
        first_sum = fma(first, first, first_sum)
        second_sum = fma(second, second, second_sum)
        i += 2 * LANES
    total = lane_sum(first_sum + second_sum)
    # The elements that are left, one by one.
    while i < width:
        element = load_one(tag, row + i * size)
        total += element * element
        i += 1
    factor = ONE / np.sqrt(total / np.float32(width) + epsilon)
    # The result, a vector at a time.
    i = 0
    while i + LANES <= width:
        normed = load_as(tag, row + i * size) * splat(factor)
        store_as(tag, out + i * size, normed * load(scale + i * F32_BYTES))
        i += LANES
    # The elements that are left, one by one.
    while i < width:
        normed_element = load_one(tag, row + i * size) * factor
        store_one(tag, out + i * size, normed_element * load_f32(scale + i * F32_BYTES))
        i += 1


@inner
def rotate_head(tag, head, cos, sin, rotary):
    """Rotate the first ``rotary`` elements of a head in place.

    Element i of the first half of these, "low", is rotated with element i of the second half,
    "high". ``cos`` and ``sin`` are halved in the same way::

        low[i], high[i] = low[i] * cos_low[i] - high[i] * sin_low[i],
                          high[i] * cos_high[i] + low[i] * sin_high[i]
    """
    size = element_bytes(tag)
    half = rotary // 2
    low = head
    high = head + half * size
    cos_high = cos + half * size
    sin_high = sin + half * size
    i = 0
    while i + LANES <= half:
        offset = i * size
        a = load_as(tag, low + offset)
        b = load_as(tag, high + offset)
        new_low = a * load_as(tag, cos + offset) - b * load_as(tag, sin + offset)
        new_high = b * load_as(tag, cos_high + offset) + a * load_as(tag, sin_high + offset)
        store_as(tag, low + offset, new_low)
        store_as(tag, high + offset, new_high)
        i += LANES
    # What is left of a half that is no multiple of 16, pair by pair.
    while i < half:
        offset = i * size
        x = load_one(tag, low + offset)
        y = load_one(tag, high + offset)
        new_x = x * load_one(tag, cos + offset) - y * load_one(tag, sin + offset)
        new_y = y * load_one(tag, cos_high + offset) + x * load_one(tag, sin_high + offset)
        store_one(tag, low + offset, new_x)
        store_one(tag, high + offset, new_y)
        i += 1


@inner
def finish_heads(tag, call, row, out, heads, scale, angle_offset):
    """Normalise and rotate so many heads, which lie side by side at ``row``, and write them to
    ``out``.

    ``scale`` is the address of the norm's weights. If it is 0 there is no norm, and ``out`` is
    ``row``.
    """
    head_bytes = call.head_size * element_bytes(tag)
    norms_all_heads = scale != 0 and call.one_norm_for_all_heads != 0
    norms_each_head = scale != 0 and call.one_norm_for_all_heads == 0
    if norms_all_heads:
        norm_row(tag, row, out, scale, width=heads * call.head_size, epsilon=call.epsilon)
    for h in range(heads):
        head = out + h * head_bytes
        if norms_each_head:
            source = row + h * head_bytes
            norm_row(tag, source, head, scale, width=call.head_size, epsilon=call.epsilon)
        cos = call.cos + angle_offset
        sin = call.sin + angle_offset
        rotate_head(tag, head + call.rotary_offset, cos, sin, call.rotary_size)


@inner
def norm_rotary_body(tag, arguments):
    """RMS norm (Zhang and Sennrich 2019) and rotary embedding (Su et al. 2021) of each row."""
    call = read_norm_rotary(arguments)
    key_offset = call.query_heads * call.head_size * element_bytes(tag)
    while True:
        first = fetch_add(arguments) * call.rows_per_item  # the counter is the first field
        if first >= call.count:
            return
        for r in range(first, min(first + call.rows_per_item, call.count)):
            source = r if call.index == 0 else load_i64(call.index + r * I64_BYTES)
            row = call.data + source * call.stride
            out = call.out + r * call.stride
            position = r if call.positions == 0 else load_i64(call.positions + r * I64_BYTES)
            angle_offset = position * call.angle_stride
            finish_heads(
                tag,
                call,
                row,
                out,
                heads=call.query_heads,
                scale=call.query_scale,
                angle_offset=angle_offset,
            )
            finish_heads(
                tag,
                call,
                row + key_offset,
                out + key_offset,
                heads=call.key_heads,
                scale=call.key_scale,
                angle_offset=angle_offset,
            )


# --------------------------------------------------------------------------- calls


class RowNorm:
    """The RMS norm of rows in the dtype of the model."""

    def __init__(self, form: NormForm, dtype: torch.dtype, kernel: Kernel) -> None:
        """``kernel`` is that of :func:`norm_rotary_body`."""
        self.machine_code = kernel
        self._form = form  # it owns the scale's memory
        self._dtype = dtype
        self._width = form.scale.numel()
        # A row is one query head.
        self._call = NormRotaryCall(
            rows_per_item=_ROWS_PER_ITEM,
            stride=self._width * dtype.itemsize,
            query_heads=1,
            head_size=self._width,
            query_scale=form.scale.data_ptr(),
            epsilon=form.epsilon,
        )

    def __call__(self, x: Tensor) -> Tensor:
        """A new tensor; x is [..., width]."""
        assert x.dtype == self._dtype
        assert x.shape[-1] == self._width
        x = x.contiguous()
        out = torch.empty_like(x)
        call = self.call_for(x.data_ptr(), out.data_ptr())
        run_rows(self.machine_code, call, rows=x.numel() // self._width, row_bytes=call.stride)
        return out

    def call_for(self, x: int, out: int, index: int = 0) -> NormRotaryCall:
        """The kernel's arguments for contiguous rows at these addresses; ``count`` is still to be
        set."""
        call = NormRotaryCall.from_buffer_copy(self._call)
        call.data = x
        call.out = out
        call.index = index
        return call


class CpuAttentionLayer:
    """Norms of query and key heads if there are any, rotary embedding, attention."""

    def __init__(self, form: AttentionForm, dtype: torch.dtype, kernel: Kernel) -> None:
        """``kernel`` is that of :func:`norm_rotary_body`."""
        self.form = form
        self.machine_code = kernel
        self._dtype = dtype
        self._gate: Kernel | None = None
        if form.is_gated:
            if form.query_heads * form.head_size % LANES != 0:
                raise Misfit(f"its gates are no multiple of {LANES}")
            self._gate = compiled_gate(dtype)
        self._row_bytes = (form.query_heads + form.key_heads) * form.head_size * dtype.itemsize
        self._call = NormRotaryCall(
            rows_per_item=_ROWS_PER_ITEM,
            query_heads=form.query_heads,
            key_heads=form.key_heads,
            head_size=form.head_size,
            one_norm_for_all_heads=form.wide_norms,
        )
        if form.norms is not None:
            self._call.epsilon = form.norms.query.epsilon
            self._call.query_scale = form.norms.query.scale.data_ptr()
            self._call.key_scale = form.norms.key.scale.data_ptr()

    def __call__(self, qkv: Tensor, cos: Tensor, sin: Tensor, paged: PagedFunction) -> Tensor:
        """See :data:`fused.forms.AttentionKernel`. All are in the dtype of the model."""
        self.norm_and_rotate(qkv, cos, sin)
        query, key, value = self.form.split(qkv)
        attended = paged(self.form.call(query, key, value))
        if self._gate is None:
            return attended
        attended = attended.contiguous()
        call = self.gate_call(qkv, attended.data_ptr())
        call.count = len(qkv)
        self._gate.run(call, 1)
        return attended

    def gate_call(self, qkv: Tensor, attended: int) -> GateCall:
        """The arguments of the gates' kernel, which changes the results of attention at this
        address in place; ``count`` is still to be set."""
        assert self.form.is_gated
        size = self._dtype.itemsize
        width = self.form.query_heads * self.form.head_size
        return GateCall(
            tokens_per_item=1,
            x=attended,
            x_stride=width * size,
            gate=qkv.data_ptr() + self.form.gate_offset * size,
            gate_stride=qkv.stride(0) * size,
            out=attended,
            out_stride=width * size,
            groups=1,
            group_size=width,
            norm=NORM_NONE,
        )

    @property
    def gate(self) -> Kernel | None:
        """The kernel of the gates; None: there are none."""
        return self._gate

    def norm_and_rotate(self, qkv: Tensor, cos: Tensor, sin: Tensor) -> None:
        """Normalise and rotate query and key heads in place."""
        # The kernel has one stride for both, and reads neighbouring elements.
        if cos.stride() != sin.stride() or cos.stride(1) != 1:
            cos = cos.contiguous()
            sin = sin.contiguous()
        call = self.call_for(qkv, cos, sin)
        run_rows(self.machine_code, call, rows=qkv.shape[0], row_bytes=self._row_bytes)

    def call_for(self, qkv: Tensor, cos: Tensor, sin: Tensor, positions: int = 0) -> NormRotaryCall:
        """The kernel's arguments; ``count`` is still to be set. The strides of cos and sin are the
        same."""
        assert qkv.is_contiguous()
        if not cos.dtype == sin.dtype == qkv.dtype == self._dtype:
            raise Misfit("the angles of its rotary embedding are of another dtype")
        size = qkv.element_size()
        call = NormRotaryCall.from_buffer_copy(self._call)
        call.data = qkv.data_ptr()
        call.out = qkv.data_ptr()
        call.stride = qkv.stride(0) * size
        call.cos = cos.data_ptr()
        call.sin = sin.data_ptr()
        call.angle_stride = cos.stride(0) * size
        call.positions = positions
        call.rotary_size = cos.shape[1]
        return call


def run_rows(kernel: Kernel, call: NormRotaryCall, *, rows: int, row_bytes: int) -> None:
    """Run over so many rows, on as many threads as they are worth."""
    call.count = rows
    threads = 1 + rows * row_bytes // _BYTES_PER_THREAD
    if threads == 1:
        call.rows_per_item = rows
    else:
        threads = min(torch.get_num_threads(), threads, rows)
        call.rows_per_item = ceil_div(rows, _ITEMS_PER_THREAD * threads)
    kernel.run(call, threads)
