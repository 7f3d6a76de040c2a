"""Linear layers on the tile unit of the processor (AMX), for bfloat16, with what follows them.

The product is our own kernel: at the few rows of a decode step it reads weights faster than
oneDNN's, a call costs a tenth, and it can be a step of a ``program``, which a call into torch
cannot. Where the processor has no tile unit, ``linear`` packs for oneDNN. Imported only where Numba
is.

A weight [N, K] is packed in columns of 16 outputs, each ``[K / 2, 16, 2]``: 16 rows of a column are
one tile. Two columns at a time meet at most 32 rows of x, so that four tiles accumulate and each
tile loaded is used twice. An item is a few pairs of columns and ROWS_PER_CHUNK rows; a row's result
depends on nothing but that row.
"""

from typing import Any

import llvmlite.ir as ir
import numpy as np
import torch
from numba import types
from numba.core import cgutils
from torch import Tensor, nn

from jitney.kernels.cpu.compiled import Call, Kernel, reader, record, source_version
from jitney.kernels.cpu.products import (
    amx_end,
    emit_amx,
    emit_shapes,
    i8,
    may_use_amx,
    move_tile,
    stack_memory,
)
from jitney.kernels.cpu.simd import (
    BF16,
    ONE,
    emitted,
    fetch_add,
    fma,
    i64,
    inner,
    load,
    load_as,
    offset_by,
    sigmoid,
    splat,
    store_as,
)
from jitney.kernels.fused.layers import Activation

STEP = 32
"""Elements of K that one tile holds."""
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
    steps: int
    """K / STEP."""
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


read_product = reader(ProductCall)

# Tiles 0 to 3 are the results of (upper, lower rows) x (first, second column), in this order.
_X, _COLUMN = 4, 6
"""The first of two tiles: of rows of x, and of columns."""


@emitted(types.int64)
def result_memory(builder):
    """The address of float32 [32, 32]."""
    return stack_memory(builder, 4096)


@emitted(types.void, *[types.int64] * 2)
def set_shapes(builder, upper, lower):
    """Set this thread's tiles for 1 to 16 ``upper`` rows and as many ``lower`` ones of x."""
    upper, lower = (builder.trunc(rows, i8) for rows in (upper, lower))
    emit_shapes(builder, [upper, upper, lower, lower, upper, lower, 16, 16], [64] * 8)


def _make_multiply(with_lower: bool) -> Any:
    """float32 ``out`` [32 or 16, 32] = rows of x times two columns of the weight, the second right
    behind the first."""

    @emitted(types.void, *[types.int64] * 5)
    def multiply(builder, x, x_stride, column, steps, out):
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
                emit_amx(builder, "tdpbf16ps", tile, _X + tile // 2, _COLUMN + tile % 2)
        for tile in results:
            where = offset_by(builder, out, tile // 2 * 16 * 128 + tile % 2 * 64)
            move_tile(builder, "tilestored64", tile, where, ir.Constant(i64, 128))

    return multiply


multiply_32 = _make_multiply(True)
multiply_16 = _make_multiply(False)


@inner
def activate(kind, x):
    """SiLU, or GELU by its tanh formula: x * sigmoid(2 sqrt(2 / pi) (x + 0.044715 x**3))."""
    if kind == SILU:
        return x * sigmoid(x)
    inside = fma(x * x, splat(np.float32(0.044715)), splat(ONE)) * x
    return x * sigmoid(inside * splat(np.float32(1.5957691216057308)))


@inner
def finish(call, pair, first, rows, result):
    """Write the float32 [rows, 32] of one pair to the output."""
    bias = call.bias + pair * 128
    for m in range(rows):
        a, b = load(result + m * 128), load(result + m * 128 + 64)
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
def multiply_chunk(call, pair, first, last, result, shaped):
    """Rows [first, last) times one pair. ``shaped`` is the row count that the tiles are set for,
    at most 32; returns the one they are set for afterwards."""
    column, x_stride = call.weight + pair * call.steps * 2048, call.steps * 2 * STEP
    while first < last:
        rows = min(last - first, 32)
        if rows != shaped:
            set_shapes(min(rows, 16), max(rows - 16, 1))
            shaped = rows
        start = call.x + first * x_stride
        if rows > 16:
            multiply_32(start, x_stride, column, call.steps, result)
        else:
            multiply_16(start, x_stride, column, call.steps, result)
        finish(call, pair, first, rows, result)
        first += rows
    return shaped


@inner
def product_body(arguments):
    """Take items until none is left."""
    call = read_product(arguments)
    result = result_memory()
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
            shaped = multiply_chunk(call, pair, first, last, result, shaped)
    amx_end()


# --------------------------------------------------------------------------- layers


def compile_product(dtype: torch.dtype) -> Kernel | None:
    """The product, for :class:`TileLinear`; None if this process may use no tile unit for products
    of ``dtype``."""
    version = source_version()
    if dtype != torch.bfloat16 or not may_use_amx():
        return None
    return Kernel(lambda address: product_body(address) if version else None)


def fits_tiles(linear: nn.Linear, activation: Activation | None = None) -> bool:
    """Whether both sizes are those of whole tiles, and the ``activation`` is one of the kernel's;
    with one, ``linear`` is that of gate and up."""
    outputs = 32 if activation is None else 64
    whole = linear.in_features % STEP == 0 and linear.out_features % outputs == 0
    return whole and activation in ACTIVATIONS


class TileLinear(nn.Module):
    """``x @ weight.T + bias`` in bfloat16; sums are float32, rounded once at the end.

    With an activation, ``weight`` [2 N, K] is that of a gate and of what it is multiplied with, one
    above the other, and the result [..., N] is ``activation(gate) * up``.
    """

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        kernel: Kernel,
        activation: Activation | None = None,
    ) -> None:
        super().__init__()
        outputs, self.in_features = weight.shape
        self.out_features = outputs if activation is None else outputs // 2
        self.kernel = kernel
        gated = activation is not None
        columns = weight.detach().view(outputs // 16, 16, self.in_features // 2, 2)
        self._packed = _interleave(columns.permute(0, 2, 1, 3), gated)
        self._bias = None
        if bias is not None:
            self._bias = _interleave(bias.detach().float().view(-1, 16), gated)
        pairs = outputs // 32
        self._call = ProductCall(
            steps=self.in_features // STEP,
            weight=self._packed.data_ptr(),
            pairs=pairs,
            pairs_per_item=max(1, pairs // _ITEMS),
            out_stride=2 * self.out_features,
            activation=ACTIVATIONS[activation],
            bias=0 if self._bias is None else self._bias.data_ptr(),
        )

    def forward(self, x: Tensor) -> Tensor:
        """x is [..., in_features]."""
        return self.plus(x, None)

    def call_for(self, x: int, out: int, other: int = 0) -> ProductCall:
        """The kernel's arguments for contiguous rows at these addresses; 0 is no ``other``. The
        number of rows is left to be set."""
        call = ProductCall.from_buffer_copy(self._call)
        call.x, call.out, call.other = x, out, other
        return call

    def plus(self, x: Tensor, other: Tensor | None) -> Tensor:
        """The result, plus ``other`` [..., out_features] if there is one."""
        assert x.dtype == torch.bfloat16
        x = x.contiguous()
        out = torch.empty((*x.shape[:-1], self.out_features), dtype=x.dtype)
        if other is not None:
            assert other.shape == out.shape
            other = other.contiguous()
        call = self.call_for(x.data_ptr(), out.data_ptr(), 0 if other is None else other.data_ptr())
        call.count = x.numel() // self.in_features
        self.kernel.run(call, torch.get_num_threads())
        return out


def _interleave(columns: Tensor, gated: bool) -> Tensor:
    """Contiguous; the columns of gate and up by turns."""
    if gated:
        columns = columns.unflatten(0, (2, -1)).transpose(0, 1)
    return columns.contiguous()
