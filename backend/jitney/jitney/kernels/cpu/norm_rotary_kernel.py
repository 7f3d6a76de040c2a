"""The norm and the rotary embedding of each row of a step, as a Numba kernel, and its calls.

A row is the heads of one token side by side, as the product of query, key and value gives them.
Each query head and each key head is normalised, if the model has such norms. Then the first
elements of the head, ``rotary_size`` of them, are rotated::

    | query head 0 | query head 1 | ... | key head 0 | ... | values (left alone) |
      norm, rotate   norm, rotate         norm, rotate

The norm of whole rows, before attention or an MLP or behind them, is the same with one query head,
as wide as the row, with no key heads and a ``rotary_size`` of 0. Behind a branch, the residual is
added to it.

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
    negate_even_lanes,
    splat,
    store_as,
    store_one,
    swap_neighbours,
)
from jitney.kernels.fused.forms import AttentionForm, Misfit, NormForm, Rotation

_BYTES_PER_THREAD = 1 << 16
"""A call gets one more thread for so many bytes of rows. For less, waking a thread costs more time
than it saves."""
_ITEMS_PER_THREAD = 4
"""Items of a call for each of its threads: if one thread is held up, the others take its items."""
_ROWS_PER_ITEM = 4
"""Rows of an item in a ``program``, where all threads are awake."""
HALVES = 0
NEIGHBOURS = 1
_TURNS: dict[Rotation, int] = {"halves": HALVES, "neighbours": NEIGHBOURS, "none": HALVES}


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
    centred: int
    """1: the norms are layer norms. They subtract the mean first."""
    query_bias: int
    """Address of float32, as many as there are weights: what a layer norm adds. 0: nothing."""
    key_bias: int
    """The same of the key heads' norm."""
    other: int
    """Address of rows as those of ``out``, which are added to the query heads' norm, of rows as
    they are numbered in ``out``. 0: nothing is added."""
    one_norm_for_all_heads: int
    """0: each head has a norm by itself, all with the same weights. 1: all query heads together
    have one norm, and so have all key heads."""
    epsilon: float
    rotary_size: int
    """How many elements of each head are rotated, in ``out``. 0: none."""
    rotary_offset: int
    """Bytes from a head's first element to the first one that is rotated."""
    turns: int
    """HALVES or NEIGHBOURS: which elements are rotated with each other (:func:`rotate_halves` and
    :func:`rotate_neighbours`)."""
    wide_angles: int
    """1: ``cos`` and ``sin`` are float32, whatever the data are."""
    cos: int
    """Address of [positions, rotary_size] in the data's type, or in float32."""
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
def mean_of_row(tag, row, width):
    """The mean of the elements of a row."""
    size = element_bytes(tag)
    sums = splat(ZERO)
    i = 0
    while i + LANES <= width:
        sums = sums + load_as(tag, row + i * size)
        i += LANES
    total = lane_sum(sums)
    while i < width:
        total += load_one(tag, row + i * size)
        i += 1
    return total / np.float32(width)


@inner
def norm_row(tag, row, out, scale, bias, other, width, epsilon, centred):
    """out = row / sqrt(mean of squares + epsilon) * scale + bias + other. If it is ``centred``, the
    row's mean is subtracted from the row first. ``bias`` and ``other`` are addresses, 0 if there is
    none. ``out`` may be ``row`` or ``other``."""
    size = element_bytes(tag)
    mean = mean_of_row(tag, row, width) if centred != 0 else ZERO
    means = splat(mean)
    # The sum of squares, two vectors at a time. There are two sums, so that an addition need not
    # wait for the one before it.
    first_sum = splat(ZERO)
    second_sum = splat(ZERO)
    i = 0
    while i + 2 * LANES <= width:
        first = load_as(tag, row + i * size) - means
        second = load_as(tag, row + (i + LANES) * size) - means
        first_sum = fma(first, first, first_sum)
        second_sum = fma(second, second, second_sum)
        i += 2 * LANES
    total = lane_sum(first_sum + second_sum)
    # The elements that are left, one by one.
    while i < width:
        element = load_one(tag, row + i * size) - mean
        total += element * element
        i += 1
    factor = ONE / np.sqrt(total / np.float32(width) + epsilon)
    # The result, a vector at a time.
    i = 0
    while i + LANES <= width:
        normed = (load_as(tag, row + i * size) - means) * splat(factor)
        result = normed * load(scale + i * F32_BYTES)
        if bias != 0:
            result = result + load(bias + i * F32_BYTES)
        if other != 0:
            result = result + load_as(tag, other + i * size)
        store_as(tag, out + i * size, result)
        i += LANES
    # The elements that are left, one by one.
    while i < width:
        normed_element = (load_one(tag, row + i * size) - mean) * factor
        one_result = normed_element * load_f32(scale + i * F32_BYTES)
        if bias != 0:
            one_result += load_f32(bias + i * F32_BYTES)
        if other != 0:
            one_result += load_one(tag, other + i * size)
        store_one(tag, out + i * size, one_result)
        i += 1


@inner
def load_angles(tag, call, address, i):
    """16 numbers of ``cos`` or ``sin``, from number ``i`` on."""
    if call.wide_angles != 0:
        return load(address + i * F32_BYTES)
    return load_as(tag, address + i * element_bytes(tag))


@inner
def load_angle(tag, call, address, i):
    """Number ``i`` of ``cos`` or ``sin``."""
    if call.wide_angles != 0:
        return load_f32(address + i * F32_BYTES)
    return load_one(tag, address + i * element_bytes(tag))


@inner
def rotate_halves(tag, call, head, cos, sin):
    """Rotate ``rotary_size`` elements in place, from ``head`` on.

    Element i of the first half of these, "low", is rotated with element i of the second half,
    "high". ``cos`` and ``sin`` are halved in the same way::

        low[i], high[i] = low[i] * cos_low[i] - high[i] * sin_low[i],
                          high[i] * cos_high[i] + low[i] * sin_high[i]
    """
    size = element_bytes(tag)
    half = call.rotary_size // 2
    low = head
    high = head + half * size
    i = 0
    while i + LANES <= half:
        offset = i * size
        a = load_as(tag, low + offset)
        b = load_as(tag, high + offset)
        new_low = a * load_angles(tag, call, cos, i) - b * load_angles(tag, call, sin, i)
        cos_high = load_angles(tag, call, cos, half + i)
        sin_high = load_angles(tag, call, sin, half + i)
        new_high = b * cos_high + a * sin_high
        store_as(tag, low + offset, new_low)
        store_as(tag, high + offset, new_high)
        i += LANES
    # What is left of a half that is no multiple of 16, pair by pair.
    while i < half:
        offset = i * size
        x = load_one(tag, low + offset)
        y = load_one(tag, high + offset)
        new_x = x * load_angle(tag, call, cos, i) - y * load_angle(tag, call, sin, i)
        one_cos = load_angle(tag, call, cos, half + i)
        one_sin = load_angle(tag, call, sin, half + i)
        store_one(tag, low + offset, new_x)
        store_one(tag, high + offset, y * one_cos + x * one_sin)
        i += 1


@inner
def rotate_neighbours(tag, call, head, cos, sin):
    """As :func:`rotate_halves`, but element 2 i is rotated with element 2 i + 1::

    x[2 i], x[2 i + 1] = x[2 i] * cos[2 i] - x[2 i + 1] * sin[2 i],
                         x[2 i + 1] * cos[2 i + 1] + x[2 i] * sin[2 i + 1]
    """
    size = element_bytes(tag)
    i = 0
    while i + LANES <= call.rotary_size:
        x = load_as(tag, head + i * size)
        turned = x * load_angles(tag, call, cos, i)
        crossed = swap_neighbours(x) * load_angles(tag, call, sin, i)
        store_as(tag, head + i * size, turned + negate_even_lanes(crossed))
        i += LANES
    # What is left, pair by pair.
    while i < call.rotary_size:
        a = load_one(tag, head + i * size)
        b = load_one(tag, head + (i + 1) * size)
        new_a = a * load_angle(tag, call, cos, i) - b * load_angle(tag, call, sin, i)
        new_b = b * load_angle(tag, call, cos, i + 1) + a * load_angle(tag, call, sin, i + 1)
        store_one(tag, head + i * size, new_a)
        store_one(tag, head + (i + 1) * size, new_b)
        i += 2


@inner
def finish_heads(tag, call, row, out, heads, scale, bias, other, angle_offset):
    """Normalise and rotate so many heads, which lie side by side at ``row``, and write them to
    ``out``.

    ``scale`` is the address of the norm's weights. If it is 0 there is no norm, and ``out`` is
    ``row``. For ``bias`` and ``other`` see :func:`norm_row`.
    """
    head_bytes = call.head_size * element_bytes(tag)
    norms_all_heads = scale != 0 and call.one_norm_for_all_heads != 0
    norms_each_head = scale != 0 and call.one_norm_for_all_heads == 0
    if norms_all_heads:
        width = heads * call.head_size
        norm_row(tag, row, out, scale, bias, other, width, call.epsilon, call.centred)
    for h in range(heads):
        head = out + h * head_bytes
        if norms_each_head:
            source = row + h * head_bytes
            size = call.head_size
            norm_row(tag, source, head, scale, bias, other, size, call.epsilon, call.centred)
        cos = call.cos + angle_offset
        sin = call.sin + angle_offset
        rotated = head + call.rotary_offset
        if call.turns == NEIGHBOURS:
            rotate_neighbours(tag, call, rotated, cos, sin)
        else:
            rotate_halves(tag, call, rotated, cos, sin)


@inner
def norm_rotary_body(tag, arguments):
    """The norm and the rotary embedding (Su et al. 2021) of each row."""
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
            other = 0 if call.other == 0 else call.other + r * call.stride
            finish_heads(
                tag,
                call,
                row,
                out,
                heads=call.query_heads,
                scale=call.query_scale,
                bias=call.query_bias,
                other=other,
                angle_offset=angle_offset,
            )
            finish_heads(
                tag,
                call,
                row + key_offset,
                out + key_offset,
                heads=call.key_heads,
                scale=call.key_scale,
                bias=call.key_bias,
                other=0,
                angle_offset=angle_offset,
            )


# --------------------------------------------------------------------------- calls


class RowNorm:
    """The norm of rows in the dtype of the model."""

    def __init__(self, form: NormForm, dtype: torch.dtype, kernel: Kernel) -> None:
        """``kernel`` is that of :func:`norm_rotary_body`."""
        self.machine_code = kernel
        self._form = form  # it owns the memory of scale and bias
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
            centred=form.centred,
            query_bias=_address(form.bias),
        )

    def __call__(self, x: Tensor) -> Tensor:
        """A new tensor; x is [..., width]."""
        return self._normed(x, None)

    def plus(self, x: Tensor, other: Tensor) -> Tensor:
        """The norm of ``x`` plus ``other``, both [..., width]: a new tensor, rounded once."""
        assert other.shape == x.shape
        assert other.dtype == self._dtype
        return self._normed(x, other.contiguous())

    def _normed(self, x: Tensor, other: Tensor | None) -> Tensor:
        assert x.dtype == self._dtype
        assert x.shape[-1] == self._width
        x = x.contiguous()
        out = torch.empty_like(x)
        call = self.call_for(x.data_ptr(), out.data_ptr(), other=_address(other))
        run_rows(self.machine_code, call, rows=x.numel() // self._width, row_bytes=call.stride)
        return out

    def call_for(self, x: int, out: int, *, index: int = 0, other: int = 0) -> NormRotaryCall:
        """The kernel's arguments for contiguous rows at these addresses; ``count`` is still to be
        set."""
        call = NormRotaryCall.from_buffer_copy(self._call)
        call.data = x
        call.out = out
        call.index = index
        call.other = other
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
            turns=_TURNS[form.rotation],
        )
        self._rotates = form.rotation != "none"
        if form.norms is not None:
            query, key = form.norms
            self._call.epsilon = query.epsilon
            self._call.centred = query.centred
            self._call.query_scale = query.scale.data_ptr()
            self._call.query_bias = _address(query.bias)
            self._call.key_scale = key.scale.data_ptr()
            self._call.key_bias = _address(key.bias)

    def __call__(self, qkv: Tensor, cos: Tensor, sin: Tensor, paged: PagedFunction) -> Tensor:
        """See :data:`fused.forms.AttentionKernel`. ``qkv`` is in the dtype of the model."""
        if self._rotates or self.form.norms is not None:
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
        if self._rotates and (cos.stride() != sin.stride() or cos.stride(1) != 1):
            cos = cos.contiguous()
            sin = sin.contiguous()
        call = self.call_for(qkv, cos, sin)
        run_rows(self.machine_code, call, rows=qkv.shape[0], row_bytes=self._row_bytes)

    def call_for(self, qkv: Tensor, cos: Tensor, sin: Tensor, positions: int = 0) -> NormRotaryCall:
        """The kernel's arguments; ``count`` is still to be set. The strides of cos and sin are the
        same."""
        assert qkv.is_contiguous()
        assert qkv.dtype == self._dtype
        call = NormRotaryCall.from_buffer_copy(self._call)
        call.data = qkv.data_ptr()
        call.out = qkv.data_ptr()
        call.stride = qkv.stride(0) * qkv.element_size()
        if not self._rotates:
            return call
        if cos.dtype != sin.dtype or cos.dtype not in (self._dtype, torch.float32):
            raise Misfit("the angles of its rotary embedding are of another dtype")
        call.wide_angles = cos.dtype == torch.float32
        call.cos = cos.data_ptr()
        call.sin = sin.data_ptr()
        call.angle_stride = cos.stride(0) * cos.element_size()
        call.positions = positions
        call.rotary_size = cos.shape[1]
        return call


def _address(tensor: Tensor | None) -> int:
    """0: there is none."""
    return 0 if tensor is None else tensor.data_ptr()


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
