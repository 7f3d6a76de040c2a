"""Linear layers by our own kernels.

x and the result are bfloat16 with weights of bfloat16, int8 or 4 bits, and float32 with weights of
float32. Which kernels a weight needs::

    weight      tag            before the product (``convert_kernel``)    the product
    float32     F32            nothing                                    ``product_kernel``
    bfloat16    BF16           nothing                                    ``product_kernel``
    bfloat16    WIDE, if no    x is widened to float32                    ``product_kernel``
                instruction
                multiplies it
    int8        I8             x is rounded to bytes, with a tail         ``product_kernel``
    4 bits      I4             x is rounded to bytes, in groups           ``four_bit_kernel``

Called by ``layer_kernels``, which makes a :class:`ColumnLinear` for a fused module, and by
``program``, where its kernels are steps of their own. Imported only where Numba is.
"""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from jitney.execution.quantized import MOST_OUTLIERS, OUTLIER
from jitney.kernels.cpu.amx import TILE_BYTES
from jitney.kernels.cpu.compiled import Kernel, KernelCall
from jitney.kernels.cpu.convert_kernel import ConvertCall, convert_body
from jitney.kernels.cpu.dot import MOST_BYTE_INPUTS
from jitney.kernels.cpu.emit import LANES, host_has
from jitney.kernels.cpu.four_bit_kernel import four_bit_body
from jitney.kernels.cpu.packed_weight import PAIR_OUTPUTS, pack_weight
from jitney.kernels.cpu.processor import may_use_amx
from jitney.kernels.cpu.product_call import ACTIVATIONS, ITEMS_PER_WEIGHT, ProductCall
from jitney.kernels.cpu.product_kernel import product_body
from jitney.kernels.cpu.simd import I4
from jitney.kernels.fused.forms import Activation, Scaling

_ROW_MULTIPLE = {torch.bfloat16: 32, torch.float32: 16, torch.int8: 16, torch.uint8: 16}
"""A row of a weight of this dtype must have a multiple of so many elements.

For bfloat16 and float32 these are 64 bytes, as in a row of a tile: the product reads x as it is, so
its rows cannot be filled up. For int8, and for nibbles (uint8, two inputs in each), x is converted:
into rows that are filled up, but from vectors of 16 elements."""


# ``typed``: all tags are 0, and so equal. Only their types differ.
@lru_cache(typed=True)
def compiled_product(tag: Any) -> Kernel:
    """The product with weights of the tag's type; compiled, or loaded, at its first use."""
    if tag is I4:
        return Kernel(lambda address: four_bit_body(I4, address))
    return Kernel(lambda address: product_body(tag, address))


@lru_cache(typed=True)
def compiled_conversion(tag: Any) -> Kernel:
    """What turns rows of bfloat16 into those that products of the tag's type read."""
    return Kernel(lambda address: convert_body(tag, address))


def fits_columns(
    weight: Tensor, activation: Activation | None = None, *, gated: bool = True
) -> bool:
    """Whether there can be a :class:`ColumnLinear` of these. It needs AVX2 at least; it does not
    need the tile unit."""
    multiple = _ROW_MULTIPLE.get(weight.dtype)
    if multiple is None or not host_has("avx2"):
        return False
    if activation not in ACTIVATIONS or weight.shape[1] % multiple != 0:
        return False
    # Sums of more products of bytes might not fit into an int32.
    if weight.dtype == torch.int8 and weight.shape[1] > MOST_BYTE_INPUTS:
        return False
    if activation is None or not gated:
        return True  # the outputs are filled up with zeros to whole pairs of columns
    # Those of gate and up are not filled up: zeros behind gate would be a gap between the two. So
    # both must have whole pairs of columns, a multiple of 32 outputs. (Whole columns would do here.
    # But the result is the input of the next product, and in bfloat16 that needs a multiple of 32.)
    return weight.shape[0] % (2 * PAIR_OUTPUTS) == 0


_UNSCALED = Scaling()


class ColumnLinear(nn.Module):
    """``x @ weight.T + bias`` in bfloat16, or in float32. The result is rounded once, at the end.

    With an activation, ``weight`` [2 N, K] is that of a gate and, below it, that of up. The result
    [..., N] is ``activation(gate) * up``. If it is not ``gated``, the result is the activation of
    the sum.

    A row's result depends on that row alone. How its K products are summed up depends on the
    weight:

    - Floats: in float32, in the order of the inputs; in bfloat16 an instruction may add up the two
      products of a unit first, or 32 of a tile.
    - Bytes: int8, with a float32 ``scale`` [N], one for each output. A row of x, times
      ``input_factors`` (``quantization.eight_bits``) if there are any, is rounded to bytes with one
      scale, except for its outliers. The sum of the products of bytes is an int32, and exact for up
      to ``dot.MOST_BYTE_INPUTS`` inputs. The outliers' products are added to it in float32.
    - Nibbles: 4 bits, with a ``scale`` as in ``quantization.four_bits``. Sums are exact within a
      scale group; those of the scale groups are added up in float32.
    """

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        activation: Activation | None = None,
        scale: Tensor | None = None,
        input_factors: Tensor | None = None,
        *,
        gated: bool = True,
    ) -> None:
        super().__init__()
        gated = gated and activation is not None
        packed = pack_weight(weight, bias, scale, gated=gated)
        outputs = weight.shape[0]
        pairs = len(packed.columns) // 2
        filled_outputs = pairs * PAIR_OUTPUTS
        inputs_per_element = 2 if weight.dtype == torch.uint8 else 1
        self.in_features = weight.shape[1] * inputs_per_element
        self.out_features = outputs // 2 if gated else outputs
        self.is_gated = gated
        self.width = filled_outputs // 2 if gated else filled_outputs
        """Numbers in a row of the result: ``out_features`` filled up to whole pairs of columns."""
        self.dtype = torch.float32 if weight.dtype == torch.float32 else torch.bfloat16
        """Of x and the result."""
        self.tag = packed.tag
        self._product = compiled_product(packed.tag)
        self._convert: Kernel | None = None
        self.converted_row_bytes = 0
        """Bytes of a row of x that was converted for the product. 0: none is converted."""
        if packed.convert_tag is not None:
            self._convert = compiled_conversion(packed.convert_tag)
            self.converted_row_bytes = packed.x_stride
        self._input_factors = input_factors
        self._packed = packed  # it owns the memory that the arguments point to
        self._call = ProductCall(
            x_stride=packed.x_stride,
            inputs=self.in_features,
            weight=packed.columns.data_ptr(),
            column_bytes=packed.column_bytes,
            column_tiles=packed.column_bytes // TILE_BYTES,
            pairs=pairs,
            pairs_per_item=max(1, pairs // ITEMS_PER_WEIGHT),
            out_stride=self.dtype.itemsize * self.width,
            activation=ACTIVATIONS[activation],
            gated=gated,
            factor=1.0,
            bias=_address(packed.bias),
            use_tiles=int(may_use_amx() and self.dtype == torch.bfloat16),
            tail=packed.tail,
            scales=_address(packed.scales),
            shifts=_address(packed.shifts),
            scale_group=packed.scale_group,
        )

    def forward(self, x: Tensor) -> Tensor:
        """x is [..., in_features]."""
        return self.plus(x, None)

    def calls(
        self,
        x: int,
        *,
        out: int,
        other: int,
        spare: int,
        scaling: Scaling = _UNSCALED,
    ) -> list[tuple[Kernel, KernelCall]]:
        """The kernels of a call, and their arguments except for the number of rows (``count``).

        ``x``, ``out`` and ``other`` are addresses of contiguous rows; if ``other`` is 0, nothing is
        added. The product is scaled first. At ``spare`` is memory that is overwritten:
        ``converted_row_bytes`` for each row.
        """
        product = ProductCall.from_buffer_copy(self._call)
        product.x = x
        product.out = out
        product.other = other
        product.factor = scaling.factor
        product.softcap = scaling.softcap or 0.0
        if self._convert is None:
            return [(self._product, product)]
        product.x = spare
        convert = ConvertCall(
            x=x,
            size=self.in_features,
            out=spare,
            out_stride=product.x_stride,
            tail=product.tail,
            outlier=OUTLIER,
            most_outliers=MOST_OUTLIERS,
            input_factors=_address(self._input_factors),
            scale_group=product.scale_group,
        )
        return [(self._convert, convert), (self._product, product)]

    def plus(self, x: Tensor, other: Tensor | None, scaling: Scaling = _UNSCALED) -> Tensor:
        """The scaled result, plus ``other`` [..., out_features] if there is one. It is added before
        an activation; if gated, ``other`` is [..., 2 * out_features], for gate and up."""
        assert x.dtype == self.dtype
        x = x.contiguous()
        # The kernel adds rows that are ``width`` wide: ``other`` is filled up. (Not so if gated,
        # where ``width`` is ``out_features``: see fits_columns.)
        if other is not None and self.width > self.out_features:
            other = functional.pad(other, (0, self.width - self.out_features))
        out = torch.empty((*x.shape[:-1], self.width), dtype=x.dtype)
        if other is not None:
            other = self._in_order(other, out)  # it lives until the kernel ends
        rows = x.numel() // self.in_features
        spare = torch.empty(rows * self.converted_row_bytes, dtype=torch.uint8)
        calls = self.calls(
            x.data_ptr(),
            out=out.data_ptr(),
            other=_address(other),
            spare=spare.data_ptr(),
            scaling=scaling,
        )
        for kernel, call in calls:
            call.count = rows
            kernel.run(call, torch.get_num_threads())
        return self.without_filling(out)

    def _in_order(self, other: Tensor, out: Tensor) -> Tensor:
        """``other`` as the kernel reads it: if gated, 16 numbers of gate and 16 of up by
        turns, as the weight's columns are."""
        if self._call.gated:
            assert other.shape[-1] == 2 * self.width
            by_column = other.unflatten(-1, (2, -1, LANES))  # [..., gate or up, column, 16]
            other = by_column.transpose(-3, -2).flatten(-3)
        else:
            assert other.shape == out.shape
        return other.contiguous()

    def without_filling(self, out: Tensor) -> Tensor:
        """The rows of ``out`` without what they are filled up with."""
        if self.width == self.out_features:
            return out
        return out[..., : self.out_features].contiguous()


class ScaledColumns(nn.Module):
    """A :class:`ColumnLinear` whose result is scaled, as that of an output layer may be."""

    def __init__(self, linear: ColumnLinear, scaling: Scaling) -> None:
        super().__init__()
        self.linear = linear
        self.scaling = scaling

    def forward(self, x: Tensor) -> Tensor:
        return self.linear.plus(x, None, self.scaling)


def _address(tensor: Tensor | None) -> int:
    """0: there is none."""
    return 0 if tensor is None else tensor.data_ptr()
