"""What is computed for each row of a step by itself: norms, rotary embedding, its other form before
a product. The kernels, and the calls of the first two on torch's threads.

A body takes the address of its record and takes items, some rows each, from a counter until none
is left. A row is computed by one thread in a fixed order, whatever the batch. Elements
are float32 or bfloat16, told apart by the type of ``tag`` (``simd``); sums are float32.
"""

import numpy as np
import torch
from torch import Tensor

from jitney.execution.interface import PagedFunction
from jitney.kernels.cpu.compiled import Call, Kernel, reader, record
from jitney.kernels.cpu.simd import (
    BF16,
    I8,
    LANES,
    ONE,
    ZERO,
    element_bytes,
    fetch_add,
    fma,
    inner,
    lane_max,
    lane_sum,
    larger,
    load,
    load_as,
    load_f32,
    load_i32,
    load_i64,
    load_one,
    nearest,
    splat,
    store,
    store_as,
    store_byte,
    store_bytes,
    store_f32,
    store_i32,
    store_one,
)
from jitney.kernels.fused.forms import AttentionForm, Misfit, NormForm

_BYTES_PER_THREAD = 1 << 16
"""Below this, waking a second thread costs more than it saves."""
_ROWS_PER_ITEM = 4
"""In a ``program``, whose threads are awake."""
_LEAST = np.float32(1e-36)
"""A group whose elements are no larger is taken for zeros: 127 over them would be infinite."""


@record
class RowsCall(Call):
    """Arguments of :func:`rows_body`. Strides are in bytes.

    A row holds query heads, then key heads, then what is left alone. A plain norm has one head.
    """

    rows_per_item: int
    data: int
    index: int
    """Address of int64 [rows]: which rows of the data to take. 0: the first ones."""
    out: int
    """Its rows are as far apart as those of the data, and may be the same."""
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
    """The first so many elements of a head are rotated, in ``out``."""
    cos: int
    """[positions, rotary size] in the data's type."""
    sin: int
    angle_stride: int
    """From row to row of both."""
    positions: int
    """Address of int64 [rows]: which rows of both belong to them. 0: the first ones."""


read_call = reader(RowsCall)


@inner
def norm_row(tag, row, out, scale, width, epsilon):
    """out = row / sqrt(mean of squares + epsilon) * scale. ``out`` may be ``row``."""
    size = element_bytes(tag)
    first, second = splat(ZERO), splat(ZERO)
    i = 0
    while i + 2 * LANES <= width:
        a, b = load_as(tag, row + i * size), load_as(tag, row + (i + LANES) * size)
        first, second = fma(a, a, first), fma(b, b, second)
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
    low, high = head, head + half * size
    i = 0
    while i + LANES <= half:
        at, other = i * size, (half + i) * size
        a, b = load_as(tag, low + at), load_as(tag, high + at)
        first = a * load_as(tag, cos + at) - b * load_as(tag, sin + at)
        second = b * load_as(tag, cos + other) + a * load_as(tag, sin + other)
        store_as(tag, low + at, first)
        store_as(tag, high + at, second)
        i += LANES
    while i < half:
        at, other = i * size, (half + i) * size
        x, y = load_one(tag, low + at), load_one(tag, high + at)
        store_one(tag, low + at, x * load_one(tag, cos + at) - y * load_one(tag, sin + at))
        store_one(tag, high + at, y * load_one(tag, cos + other) + x * load_one(tag, sin + other))
        i += 1


@inner
def finish_heads(tag, call, row, out, heads, scale, angles):
    """Norm, if there is a ``scale``, and rotate so many heads side by side."""
    size = call.head_size * element_bytes(tag)
    if scale != 0 and call.wide != 0:
        norm_row(tag, row, out, scale, heads * call.head_size, call.epsilon)
    for h in range(heads):
        if scale != 0 and call.wide == 0:
            norm_row(tag, row + h * size, out + h * size, scale, call.head_size, call.epsilon)
        rotate_head(tag, out + h * size, call.cos + angles, call.sin + angles, call.rotary_size)


@inner
def rows_body(tag, arguments):
    """RMS norm (Zhang and Sennrich 2019) and rotary embedding (Su et al. 2021) of each row."""
    call = read_call(arguments)
    keys = call.query_heads * call.head_size * element_bytes(tag)
    while True:
        first = fetch_add(arguments) * call.rows_per_item
        if first >= call.count:
            return
        for r in range(first, min(first + call.rows_per_item, call.count)):
            row = call.data + (r if call.index == 0 else load_i64(call.index + 8 * r)) * call.stride
            out = call.out + r * call.stride
            position = r if call.positions == 0 else load_i64(call.positions + 8 * r)
            angles = position * call.angle_stride
            finish_heads(tag, call, row, out, call.query_heads, call.query_scale, angles)
            finish_heads(
                tag, call, row + keys, out + keys, call.key_heads, call.key_scale, angles
            )  # fmt: skip


# --------------------------------------------------------------------------- before a product


@record
class ConvertCall(Call):
    """Arguments of :func:`convert_body`."""

    x: int
    """bfloat16 [count, size]"""
    size: int
    """A multiple of 16."""
    out: int
    """uint8, or float32, [count, size]"""
    out_stride: int
    tail: int
    """Of bytes: how far behind the beginning of a row of ``out`` are its float32 scale, int32 how
    many outliers it has, and of each its int32 index and its float32 value."""
    outlier: float
    """An outlier is larger than so many times the mean size of its row."""
    most_outliers: int
    factors: int
    """Address of float32 [size]: bytes are of x times them. 0: there are none."""
    group: int
    """Of nibbles: inputs with a scale of their own. Behind a row's bytes, which have a sign, are
    float32 [size / group, 2]: a group's scale, and the sum of its bytes times that."""


read_convert = reader(ConvertCall)


@inner
def load_scaled(call, row, i):
    """16 elements of x times their factors."""
    x = load_as(BF16, row + 2 * i)
    return x if call.factors == 0 else x * load(call.factors + 4 * i)


@inner
def list_outliers(call, row, limit, tail):
    """Write to the tail what is larger than ``limit``, which is drawn closer twice, as outliers are
    no part of the mean, and doubled while there are too many. Returns the size of the
    largest element of the rest."""
    turn = 0
    while True:
        count, rest, total, others = 0, ZERO, splat(ZERO), ZERO
        for i in range(0, call.size, LANES):
            x = load_scaled(call, row, i)
            x = larger(x, splat(ZERO) - x)
            best = lane_max(x)
            if best <= limit:
                rest, total = max(rest, best), total + x
                continue
            for k in range(i, i + LANES):
                value = load_one(BF16, row + 2 * k)
                if call.factors != 0:
                    value *= load_f32(call.factors + 4 * k)
                if abs(value) <= limit:
                    rest, others = max(rest, abs(value)), others + abs(value)
                    continue
                if count < call.most_outliers:
                    store_i32(tail + 8 + 8 * count, np.int32(k))
                    store_f32(tail + 12 + 8 * count, value)
                count += 1
        closer = (lane_sum(total) + others) * (call.outlier / np.float32(call.size))
        if count > call.most_outliers:
            limit, turn = limit + limit + np.float32(1e-30), 2
        elif turn < 2 and rest > closer:
            limit, turn = closer, turn + 1
        else:
            store_i32(tail + 4, np.int32(count))
            return rest


@inner
def round_row(call, row, out):
    """x -> 128 + x / scale, as bytes, where the scale makes the largest element 127. Outliers, far
    larger than the others, are 128 (a zero): the scale follows the others, and the product adds
    what outliers are worth (``product_kernel.finish``)."""
    size, tail = call.size, out + call.tail
    best, total, strange = splat(ZERO), splat(ZERO), splat(ZERO)
    for i in range(0, size, LANES):
        x = load_scaled(call, row, i)
        positive = larger(x, splat(ZERO) - x)
        best, total = larger(positive, best), total + positive
        strange = fma(x, splat(ZERO), strange)  # NaN, if x is or is not finite
    largest, limit = lane_max(best), lane_sum(total) * (call.outlier / np.float32(size))
    store_i32(tail + 4, np.int32(0))
    if largest > limit:
        largest = list_outliers(call, row, limit, tail)
    store_f32(tail, largest / np.float32(127.0) + lane_sum(strange))
    share = splat(np.float32(127.0) / largest if largest > ZERO else ZERO)
    for i in range(0, size, LANES):
        store_bytes(out + i, load_scaled(call, row, i) * share)
    for n in range(load_i32(tail + 4)):
        store_byte(out + load_i32(tail + 8 + 8 * n), np.uint8(128))


@inner
def round_groups(call, row, out):
    """x -> x / scale, where a scale for each group makes its largest element 127."""
    factors = out + call.size
    for begin in range(0, call.size, call.group):
        best, strange = splat(ZERO), splat(ZERO)
        for i in range(begin, begin + call.group, LANES):
            x = load_as(BF16, row + 2 * i)
            best = larger(larger(x, splat(ZERO) - x), best)
            strange = fma(x, splat(ZERO), strange)  # NaN, if x is or is not finite
        largest, total = lane_max(best), splat(ZERO)
        share = splat(np.float32(127.0) / largest if largest > _LEAST else ZERO)
        for i in range(begin, begin + call.group, LANES):
            whole = nearest(load_as(BF16, row + 2 * i) * share)
            store_as(I8, out + i, whole)
            total = total + whole
        scale = largest / np.float32(127.0) + lane_sum(strange)
        store_f32(factors, scale)
        store_f32(factors + 4, scale * lane_sum(total))
        factors += 8


@inner
def convert_body(tag, arguments):
    """Rows of bfloat16 to what products with weights of the tag's type read: of I8 bytes, each row
    with a tail; of I4 bytes in groups; of F32 the same numbers in float32."""
    call = read_convert(arguments)
    while True:
        first = fetch_add(arguments) * _ROWS_PER_ITEM
        if first >= call.count:
            return
        for r in range(first, min(first + _ROWS_PER_ITEM, call.count)):
            row, out = call.x + r * call.size * 2, call.out + r * call.out_stride
            if element_bytes(tag) == 1:
                round_row(call, row, out)
            elif element_bytes(tag) == 2:
                round_groups(call, row, out)
            else:
                for i in range(0, call.size, LANES):
                    store(out + 4 * i, load_as(BF16, row + 2 * i))


# --------------------------------------------------------------------------- calls


class RowNorm:
    """The RMS norm of rows in the dtype of the model."""

    def __init__(self, form: NormForm, dtype: torch.dtype, kernel: Kernel) -> None:
        self.kernel, self._form, self._dtype = kernel, form, dtype  # it owns the scale's memory
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
        _run(self.kernel, call, x.numel() // x.shape[-1], call.stride)
        return out

    def call_for(self, x: int, out: int, index: int = 0) -> RowsCall:
        """The kernel's arguments for contiguous rows at these addresses, but for their number."""
        call = RowsCall.from_buffer_copy(self._call)
        call.data, call.out, call.index = x, out, index
        return call


class CpuHeadAttention:
    """Norms of query and key heads if there are any, rotary embedding, attention."""

    def __init__(self, form: AttentionForm, dtype: torch.dtype, kernel: Kernel) -> None:
        self.form, self.kernel, self._dtype = form, kernel, dtype
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
            self._call.query_scale, self._call.key_scale = (
                query.scale.data_ptr(), key.scale.data_ptr(),
            )  # fmt: skip

    def __call__(self, qkv: Tensor, cos: Tensor, sin: Tensor, paged: PagedFunction) -> Tensor:
        """See :data:`fused.forms.AttentionKernel`. All are in the dtype of the model."""
        self.rotate(qkv, cos, sin)
        return paged(self.form.call(*self.form.split(qkv)))

    def rotate(self, qkv: Tensor, cos: Tensor, sin: Tensor) -> None:
        """Norm and rotate query and key heads in place."""
        if cos.stride() != sin.stride() or cos.stride(1) != 1:
            cos, sin = cos.contiguous(), sin.contiguous()
        _run(self.kernel, self.call_for(qkv, cos, sin), qkv.shape[0], self._row_bytes)

    def call_for(self, qkv: Tensor, cos: Tensor, sin: Tensor, positions: int = 0) -> RowsCall:
        """The kernel's arguments, but for the number of rows. cos and sin have the same strides."""
        assert qkv.is_contiguous()
        if not cos.dtype == sin.dtype == qkv.dtype == self._dtype:
            raise Misfit("the angles of its rotary embedding are of another dtype")
        call, size = RowsCall.from_buffer_copy(self._call), qkv.element_size()
        call.data = call.out = qkv.data_ptr()
        call.stride, call.angle_stride = qkv.stride(0) * size, cos.stride(0) * size
        call.cos, call.sin, call.positions = cos.data_ptr(), sin.data_ptr(), positions
        call.rotary_size = cos.shape[1]
        return call


def _run(kernel: Kernel, call: RowsCall, rows: int, row_bytes: int) -> None:
    """Run over so many rows, on as many threads as they are worth."""
    call.count = call.rows_per_item = rows
    threads = 1 + rows * row_bytes // _BYTES_PER_THREAD
    if threads > 1:
        threads = min(torch.get_num_threads(), threads, rows)
        # A few items per thread, so that one that is held up does not hold up the others.
        call.rows_per_item = -(-rows // (4 * threads))
    kernel.run(call, threads)
