"""Linear layers in bfloat16 by our own kernel, with what follows them.

At the few rows of a decode step it reads weights faster than oneDNN's, a call costs a tenth, and it
can be a step of a ``program``, which a call into torch cannot. The product of a few rows is one of
two micro-kernels: the tile unit's (AMX) where there is one, else that of vectors, which widens to
float32 what the processor does not multiply. Imported only where Numba is.

A weight [N, K] is packed in columns of 16 outputs, each ``[K / 2, 16, 2]``: 16 rows of a column are
one tile, and each row is one vector. Two columns at a time meet at most 32 rows of x in the tile
unit, so that four tiles accumulate and each tile loaded is used twice; or MAX_ROWS in vectors. An
item is a few pairs of columns and ROWS_PER_CHUNK rows; a row's result depends on nothing but that
row.
"""

from functools import cached_property
from typing import Any

import llvmlite.ir as ir
import numpy as np
import torch
from numba import types
from numba.core import cgutils
from torch import Tensor, nn
from torch.nn import functional

from jitney.kernels.cpu.compiled import Call, Kernel, reader, record, source_version
from jitney.kernels.cpu.products import (
    MAX_ROWS,
    VECTOR_BYTES,
    amx_end,
    emit_amx,
    emit_shapes,
    i8,
    make_tile,
    may_use_amx,
    move_tile,
    stack_memory,
)
from jitney.kernels.cpu.rows import RoundCall, round_body, widen_body
from jitney.kernels.cpu.simd import (
    BF16,
    I8,
    LANES,
    ONE,
    TAG,
    UNIT_BYTES,
    WIDE,
    element_bytes,
    emitted,
    fetch_add,
    fma,
    host_has,
    i64,
    inner,
    load,
    load_as,
    load_difference,
    load_f32,
    offset_by,
    sigmoid,
    splat,
    store_as,
    store_i64,
)
from jitney.kernels.fused.layers import Activation

STEP_BYTES = 64
"""Of an output's weights: what one tile holds."""
ROWS_PER_CHUNK = 128
_ITEMS = 64
"""About so many items a product is cut into: many enough to share out, few enough to be cheap."""
SILU, GELU_TANH = 1, 2
ACTIVATIONS: dict[Activation | None, int] = {None: 0, "silu": SILU, "gelu_tanh": GELU_TANH}


@record
class ProductCall(Call):
    """Arguments of :func:`product_body`."""

    x: int
    """[count, K]"""
    x_stride: int
    """Bytes from row to row."""
    steps: int
    """Of STEP_BYTES in an output's weights."""
    weight: int
    """Packed."""
    pairs: int
    """Of columns: N / 32."""
    pairs_per_item: int
    out: int
    out_stride: int
    """Bytes from row to row."""
    activation: int
    """0: none. Else the pairs are (gate, up), and 16 outputs come of each."""
    other: int
    """Address of [count, N], ``out_stride`` apart, added to the result. 0: none."""
    bias: int
    """Address of float32 [N]. 0: none."""
    tiles: int
    """Whether the processor's tile unit is used: 0 or 1."""
    row_scales: int
    """Of bytes: address of float32 [count]."""
    scales: int
    """Of bytes: address of float32 [N]."""
    shifts: int
    """Of bytes: address of int32 [N], 128 times the sum of each output's weights."""


read_product = reader(ProductCall)

# Tiles 0 to 3 are the results of (upper, lower rows) x (first, second column), in this order.
_X, _COLUMN = 4, 6
"""The first of two tiles: of rows of x, and of columns."""
_AHEAD = 2
"""The vectors' micro-kernel asks for the pair of columns after the one it reads."""


@emitted(types.int64)
def result_memory(builder):
    """The address of float32 [32, 32]."""
    return stack_memory(builder, 4096)


@emitted(types.int64)
def column_list(builder):
    """The address of int64 [2 + _AHEAD]."""
    return stack_memory(builder, 8 * (2 + _AHEAD))


@emitted(types.void, *[types.int64] * 2)
def set_shapes(builder, upper, lower):
    """Set this thread's tiles for 1 to 16 ``upper`` rows and as many ``lower`` ones of x."""
    upper, lower = (builder.trunc(rows, i8) for rows in (upper, lower))
    emit_shapes(builder, [upper, upper, lower, lower, upper, lower, 16, 16], [64] * 8)


def _make_multiply(with_lower: bool) -> Any:
    """``out`` [32 or 16, 32] = rows of x times two columns of the weight, the second right behind
    the first: float32, or int32 of bytes."""

    @emitted(types.void, TAG, *[types.int64] * 5)
    def multiply(builder, tag, x, x_stride, column, steps, out):
        dot = "tdpbusd" if tag == types.int8 else "tdpbf16ps"
        line = ir.Constant(i64, 64)
        second = offset_by(builder, column, steps, 1024)
        lower = offset_by(builder, x, 16, x_stride)
        results = range(4 if with_lower else 2)
        for tile in results:
            emit_amx(builder, "tilezero", tile)
        with cgutils.for_range(builder, steps) as loop:
            for n, start in enumerate((column, second)):
                where = offset_by(builder, start, loop.index, 1024)
                move_tile(builder, "tileloadd64", _COLUMN + n, where, line)
            for n, start in enumerate((x, lower)[: 1 + with_lower]):
                where = offset_by(builder, start, loop.index, line)
                move_tile(builder, "tileloadd64", _X + n, where, x_stride)
            for tile in results:
                emit_amx(builder, dot, tile, _X + tile // 2, _COLUMN + tile % 2)
        for tile in results:
            where = offset_by(builder, out, tile // 2 * 16 * 128 + tile % 2 * 64)
            move_tile(builder, "tilestored64", tile, where, ir.Constant(i64, 128))

    return multiply


multiply_32 = _make_multiply(True)
multiply_16 = _make_multiply(False)
multiply_vectors = make_tile(2, across=True, ahead=_AHEAD)


@inner
def activate(kind, x):
    """SiLU, or GELU by its tanh formula: x * sigmoid(2 sqrt(2 / pi) (x + 0.044715 x**3))."""
    if kind == SILU:
        return x * sigmoid(x)
    inside = fma(x * x, splat(np.float32(0.044715)), splat(ONE)) * x
    return x * sigmoid(inside * splat(np.float32(1.5957691216057308)))


@inner
def finish(tag, call, pair, first, rows, result):
    """Write the [rows, 32] of one pair to the output."""
    bias = call.bias + pair * 128
    for m in range(rows):
        where = result + m * 128
        if element_bytes(tag) == 1:
            shift, scale = call.shifts + pair * 128, call.scales + pair * 128
            row = splat(load_f32(call.row_scales + 4 * (first + m)))
            a = load_difference(where, shift) * (load(scale) * row)
            b = load_difference(where + 64, shift + 64) * (load(scale + 64) * row)
        else:
            a, b = load(where), load(where + 64)
        if call.bias != 0:
            a, b = a + load(bias), b + load(bias + 64)
        at = (first + m) * call.out_stride + pair * (64 if call.activation == 0 else 32)
        if call.activation != 0:
            store_as(BF16, call.out + at, activate(call.activation, a) * b)
            continue
        if call.other != 0:
            a = a + load_as(BF16, call.other + at)
            b = b + load_as(BF16, call.other + at + 32)
        store_as(BF16, call.out + at, a)
        store_as(BF16, call.out + at + 32, b)


@inner
def multiply_by_tiles(tag, call, pair, first, last, result, shaped):
    """Rows [first, last) times one pair. ``shaped`` is the row count that the tiles are set for,
    at most 32; returns the one they are set for afterwards."""
    column, x_stride = call.weight + pair * call.steps * 2048, call.x_stride
    while first < last:
        rows = min(last - first, 32)
        if rows != shaped:
            set_shapes(min(rows, 16), max(rows - 16, 1))
            shaped = rows
        start = call.x + first * x_stride
        if rows > 16:
            multiply_32(tag, start, x_stride, column, call.steps, result)
        else:
            multiply_16(tag, start, x_stride, column, call.steps, result)
        finish(tag, call, pair, first, rows, result)
        first += rows
    return shaped


@inner
def multiply_by_vectors(tag, call, pair, first, last, result, columns):
    """Rows [first, last) times one pair, in slices of equal size. ``columns`` is overwritten."""
    count = last - first
    for n in range(2 + _AHEAD):
        store_i64(columns + 8 * n, call.weight + (2 * pair + n) * call.steps * 1024)
    slices = -(-count // MAX_ROWS)
    for i in range(slices):
        begin = first + count * i // slices
        rows = first + count * (i + 1) // slices - begin
        multiply_vectors(
            tag, False, rows, call.x + begin * call.x_stride, call.x_stride, columns, 1,
            call.steps * 16, VECTOR_BYTES, 0, result, 128,
        )  # fmt: skip
        finish(tag, call, pair, begin, rows, result)


@inner
def product_body(tag, arguments):
    """Take items until none is left."""
    call = read_product(arguments)
    result, columns = result_memory(), column_list()
    groups = -(-call.pairs // call.pairs_per_item)
    shaped = np.int64(0)
    while True:
        item = fetch_add(arguments)
        first = item // groups * ROWS_PER_CHUNK
        if first >= call.count:
            break
        begin = item % groups * call.pairs_per_item
        for pair in range(begin, min(begin + call.pairs_per_item, call.pairs)):
            last = min(first + ROWS_PER_CHUNK, call.count)
            if call.tiles != 0:
                shaped = multiply_by_tiles(tag, call, pair, first, last, result, shaped)
            else:
                multiply_by_vectors(tag, call, pair, first, last, result, columns)
    if call.tiles != 0:
        amx_end()


# --------------------------------------------------------------------------- layers


def widens() -> bool:
    """Whether the processor multiplies no bfloat16, so that it has to be widened."""
    return not may_use_amx() and not host_has("avx512bf16")


class Products:
    """The kernels of linear layers, each compiled, or found in Numba's cache, at its first use."""

    @cached_property
    def halves(self) -> Kernel:
        """Of bfloat16."""
        version, tag = source_version(), WIDE if widens() else BF16
        return Kernel(lambda address: product_body(tag, address) if version else None)

    @cached_property
    def bytes(self) -> Kernel:
        """Of bytes."""
        version = source_version()
        return Kernel(lambda address: product_body(I8, address) if version else None)

    @cached_property
    def widen(self) -> Kernel:
        """From bfloat16 to float32."""
        version = source_version()
        return Kernel(lambda address: widen_body(address) if version else None)

    @cached_property
    def round(self) -> Kernel:
        """From bfloat16 to bytes."""
        version = source_version()
        return Kernel(lambda address: round_body(address) if version else None)


def fits_tiles(weight: Tensor, activation: Activation | None = None) -> bool:
    """Whether there is a product of its dtype, both sizes are those of whole tiles (rows of bytes
    are filled up with zeros), and the ``activation`` is one of the kernel's; with one, ``weight``
    is that of gate and up."""
    if weight.dtype not in (torch.bfloat16, torch.int8) or activation not in ACTIVATIONS:
        return False
    outputs, inputs = 32 if activation is None else 64, 32 if weight.dtype == torch.bfloat16 else 16
    return weight.shape[0] % outputs == 0 and weight.shape[1] % inputs == 0


class TileLinear(nn.Module):
    """``x @ weight.T + bias`` in bfloat16; sums are float32, rounded once at the end.

    With an activation, ``weight`` [2 N, K] is that of a gate and of what it is multiplied with, one
    above the other, and the result [..., N] is ``activation(gate) * up``.

    A weight of int8 has a float32 ``scale`` [N] for each output; each row of x is rounded to bytes
    of a scale of its own, and the sums of their products are exact.
    """

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        products: Products,
        activation: Activation | None = None,
        scale: Tensor | None = None,
    ) -> None:
        super().__init__()
        outputs, self.in_features = weight.shape
        self.out_features = outputs if activation is None else outputs // 2
        self.kernel = products.halves if scale is None else products.bytes
        self._before = None if scale is None else products.round
        if scale is None and widens():
            self._before = products.widen
        unit, step = UNIT_BYTES // weight.itemsize, STEP_BYTES // weight.itemsize
        filled = functional.pad(weight.detach(), (0, -self.in_features % step))
        columns = filled.view(outputs // LANES, LANES, -1, unit)
        pairs, gated = outputs // (2 * LANES), activation is not None
        packed = {"weight": _interleave(columns.permute(0, 2, 1, 3), gated)}
        if bias is not None:
            packed["bias"] = _interleave(bias.detach().float().view(-1, LANES), gated)
        if scale is not None:
            packed["scales"] = _interleave(scale.detach().float().view(-1, LANES), gated)
            sums = 128 * weight.detach().sum(1, dtype=torch.int32)
            packed["shifts"] = _interleave(sums.view(-1, LANES), gated)
        self._packed = packed
        stride = filled.shape[1] * (4 if scale is None and widens() else weight.itemsize)
        self.spare_bytes = 0 if self._before is None else stride
        """For each row of x: see :meth:`calls`."""
        self._call = ProductCall(
            x_stride=stride,
            steps=filled.shape[1] // step,
            pairs=pairs,
            pairs_per_item=max(1, pairs // _ITEMS),
            out_stride=2 * self.out_features,
            activation=ACTIVATIONS[activation],
            tiles=int(may_use_amx()),
            **{name: each.data_ptr() for name, each in packed.items()},
        )

    def forward(self, x: Tensor) -> Tensor:
        """x is [..., in_features]."""
        return self.plus(x, None)

    def calls(
        self, x: int, out: int, other: int, spare: tuple[int, int]
    ) -> list[tuple[Kernel, Call]]:
        """Kernels and their arguments for contiguous rows at these addresses; 0 is no ``other``,
        and ``spare`` has room for ``spare_bytes`` and for a float32 for each row. The number of
        rows is left to be set."""
        call = ProductCall.from_buffer_copy(self._call)
        call.x, call.out, call.other = x, out, other
        if self._before is None:
            return [(self.kernel, call)]
        call.x, call.row_scales = spare
        first = RoundCall(
            x=x, size=self.in_features, out=call.x, out_stride=call.x_stride, scales=spare[1]
        )
        return [(self._before, first), (self.kernel, call)]

    def plus(self, x: Tensor, other: Tensor | None) -> Tensor:
        """The result, plus ``other`` [..., out_features] if there is one."""
        assert x.dtype == torch.bfloat16
        x = x.contiguous()
        out = torch.empty((*x.shape[:-1], self.out_features), dtype=x.dtype)
        if other is not None:
            assert other.shape == out.shape
            other = other.contiguous()
        rows = x.numel() // self.in_features
        spare = torch.empty(rows * self.spare_bytes, dtype=torch.uint8), torch.empty(rows)
        places = x.data_ptr(), out.data_ptr(), 0 if other is None else other.data_ptr()
        for kernel, call in self.calls(*places, (spare[0].data_ptr(), spare[1].data_ptr())):
            call.count = rows
            kernel.run(call, torch.get_num_threads())
        return out


def _interleave(columns: Tensor, gated: bool) -> Tensor:
    """Contiguous; the columns of gate and up by turns."""
    if gated:
        columns = columns.unflatten(0, (2, -1)).transpose(0, 1)
    return columns.contiguous()
