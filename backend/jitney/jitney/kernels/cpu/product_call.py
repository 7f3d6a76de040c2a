"""The arguments of the kernels of linear layers, and the sizes by which their work is cut.

Filled by ``column_linear``, read by the kernels: ``product_kernel`` and ``four_bit_kernel``.
"""

from jitney.kernels.cpu.amx import TILE_ROWS
from jitney.kernels.cpu.compiled import KernelCall, reader, record
from jitney.kernels.cpu.emit import VECTOR_BYTES
from jitney.kernels.fused.forms import Activation

ITEMS_PER_WEIGHT = 64
"""An item has ``pairs // 64`` pairs, at least one (``column_linear``). So a weight of 64 pairs or
more has 64 to 127 items, and a smaller one has as many as it has pairs. That is enough to share out
among threads, and few enough that the counter costs nothing."""
ROWS_PER_ITEM = 128
"""Rows of x of an item, at most."""
ROWS_BY_TILES = 2 * TILE_ROWS
"""Rows of x that the tile unit multiplies at once: two tiles of them."""
PAIR_ROW_BYTES = 2 * VECTOR_BYTES
"""Bytes of one row of a pair's result: 32 float32, one for each output. The bias, the scales and
the shifts of a pair's 32 outputs have as many bytes."""
RESULT_BYTES = ROWS_PER_ITEM * PAIR_ROW_BYTES
"""Bytes of a pair's result for all rows of an item."""

NONE = 0
SILU = 1
GELU_TANH = 2
GELU = 3
RELU = 4
ACTIVATIONS: dict[Activation | None, int] = {
    None: NONE,
    "silu": SILU,
    "gelu_tanh": GELU_TANH,
    "gelu": GELU,
    "relu": RELU,
}


@record
class ProductCall(KernelCall):
    """The arguments; ``count`` is in rows. x is [count, K], the weight [N, K]. An address is 0
    where there is nothing.

    Some fields are for one kind of weight: *floats* are bfloat16 or float32, *bytes* are int8,
    *nibbles* have 4 bits.
    """

    x: int
    """Address of the rows, in the form that the product reads (``convert_kernel``)."""
    x_stride: int
    """Bytes from row to row."""
    inputs: int
    """K. Only the product of nibbles reads it."""
    weight: int
    """Address of the packed columns."""
    column_bytes: int
    """Bytes of a packed column."""
    column_tiles: int
    """Of floats and bytes: tiles of a column, each of 16 vectors. A row of x has 16 units for each
    tile: one unit for each vector."""
    pairs: int
    """Pairs of columns: N / 32."""
    pairs_per_item: int
    """How many of them an item has. Its rows are ROWS_PER_ITEM."""
    out: int
    """Address of the result: [count, N], or [count, N / 2] if it is gated."""
    out_stride: int
    """Bytes from row to row."""
    activation: int
    """NONE, or one of the others in ACTIVATIONS."""
    gated: int
    """1: the first column of a pair is a gate's and the second one its up's, and the pair gives 16
    outputs: activation(gate) * up. 0: it gives 32, each the activation of its sum."""
    factor: float
    """The product, with its bias, is multiplied by this."""
    softcap: float
    """If not 0: what ``factor`` gives becomes ``softcap * tanh(that / softcap)``."""
    other: int
    """Address of [count, N] in the result's type, which is added to the product times ``factor``.
    It is in the order of the weight's columns: if gated, 16 numbers of gate and 16 of up by turns.
    """
    bias: int
    """Address of float32 [N]."""
    use_tiles: int
    """1: use the processor's tile unit."""
    tail: int
    """Of bytes: from the beginning of a row of x to its tail (``convert_kernel``)."""
    scales: int
    """Of bytes: address of float32 [N], the scale of each output."""
    shifts: int
    """Of bytes: address of int32 [N], 128 times the sum of each output's weights."""
    scale_group: int
    """Of nibbles: how many inputs share a scale."""


read_product = reader(ProductCall)
