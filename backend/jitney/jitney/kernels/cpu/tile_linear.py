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

Called by ``layer_kernels``, which makes a :class:`TileLinear` for a fused module, and by
``program``, where its kernels are steps of their own. Imported only where Numba is.
"""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from jitney.execution.quantized import MOST_OUTLIERS, OUTLIER
from jitney.kernels.cpu.amx import TILE_BYTES
from jitney.kernels.cpu.compiled import Kernel, KernelCall, source_version
from jitney.kernels.cpu.convert_kernel import ConvertCall, convert_body
from jitney.kernels.cpu.emit import LANES, host_has
from jitney.kernels.cpu.four_bit_kernel import groups_body
from jitney.kernels.cpu.packed_weight import PAIR_OUTPUTS, pack_weight
from jitney.kernels.cpu.processor import may_use_amx
from jitney.kernels.cpu.product_call import ACTIVATIONS, ITEMS, ProductCall
from jitney.kernels.cpu.product_kernel import product_body
from jitney.kernels.cpu.simd import I4
from jitney.kernels.fused.forms import Activation

_ROW_MULTIPLE = {torch.bfloat16: 32, torch.float32: 16, torch.int8: 16, torch.uint8: 16}
"""A row of a weight of this dtype must have a multiple of so many elements. For bfloat16 and
float32 these are 64 bytes, a row of a tile: x may be read as it is, so nothing is filled up. For
int8 and nibbles (uint8, two inputs in each) x is converted, into rows that are filled up."""


# ``typed``: all tags are 0, and so equal. Only their types differ.
@lru_cache(typed=True)
def product_kernel(tag: Any) -> Kernel:
    """The product with weights of the tag's type; compiled, or loaded, at its first use."""
    version = source_version()
    if tag is I4:
        return Kernel(lambda address: groups_body(I4, address) if version else None)
    return Kernel(lambda address: product_body(tag, address) if version else None)


@lru_cache(typed=True)
def convert_kernel(tag: Any) -> Kernel:
    """What turns rows of bfloat16 into those that products of the tag's type read."""
    version = source_version()
    return Kernel(lambda address: convert_body(tag, address) if version else None)


def fits_tiles(weight: Tensor, activation: Activation | None = None) -> bool:
    """Whether there can be a :class:`TileLinear` of this weight and ``activation``."""
    multiple = _ROW_MULTIPLE.get(weight.dtype)
    if multiple is None or not host_has("avx2"):
        return False
    if activation not in ACTIVATIONS or weight.shape[1] % multiple != 0:
        return False
    # Outputs are filled up to whole pairs of columns. Not those of a gate and up: between the two
    # there would be a gap.
    return activation is None or weight.shape[0] % (2 * PAIR_OUTPUTS) == 0


class TileLinear(nn.Module):
    """``x @ weight.T + bias`` in bfloat16, or in float32. Sums are float32, of the inputs in their
    order, and are rounded once at the end.

    With an activation, ``weight`` [2 N, K] is that of a gate and, below it, that of up. The result
    [..., N] is ``activation(gate) * up``.

    A weight of int8 comes with a float32 ``scale`` [N], one for each output. Each row of x, times
    ``factors`` (``quantization.eight_bits``) if there are any, is rounded to bytes with one scale,
    except for its outliers. Sums of products of bytes are exact.

    A weight of 4 bits, and its ``scale``, are as in ``quantization.four_bits``.
    """

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        activation: Activation | None = None,
        scale: Tensor | None = None,
        factors: Tensor | None = None,
    ) -> None:
        super().__init__()
        gated = activation is not None
        packed = pack_weight(weight, bias, scale, gated=gated)
        outputs = weight.shape[0]
        pairs = len(packed.columns) // 2
        filled_outputs = pairs * PAIR_OUTPUTS
        has_nibbles = weight.dtype == torch.uint8
        self.in_features = weight.shape[1] * (2 if has_nibbles else 1)
        self.out_features = outputs // 2 if gated else outputs
        self.width = filled_outputs // 2 if gated else filled_outputs
        """Numbers in a row of the result: ``out_features`` filled up to whole pairs of columns."""
        self.dtype = torch.float32 if weight.dtype == torch.float32 else torch.bfloat16
        """Of x and the result."""
        self.kernel = product_kernel(packed.tag)
        self._convert: Kernel | None = None
        self.spare_bytes = 0
        """Bytes that :meth:`calls` needs for each row of x, to convert it."""
        if packed.convert_tag is not None:
            self._convert = convert_kernel(packed.convert_tag)
            self.spare_bytes = packed.x_stride
        self._factors = factors
        self._packed = packed  # it owns the memory that the arguments point to
        self._call = ProductCall(
            x_stride=packed.x_stride,
            inputs=self.in_features,
            weight=packed.columns.data_ptr(),
            column_bytes=packed.column_bytes,
            column_tiles=packed.column_bytes // TILE_BYTES,
            pairs=pairs,
            pairs_per_item=max(1, pairs // ITEMS),
            out_stride=self.dtype.itemsize * self.width,
            activation=ACTIVATIONS[activation],
            bias=_address(packed.bias),
            use_tiles=int(may_use_amx() and self.dtype == torch.bfloat16),
            tail=packed.tail,
            scales=_address(packed.scales),
            shifts=_address(packed.shifts),
            group=packed.group,
        )

    def forward(self, x: Tensor) -> Tensor:
        """x is [..., in_features]."""
        return self.plus(x, None)

    def calls(self, x: int, *, out: int, other: int, spare: int) -> list[tuple[Kernel, KernelCall]]:
        """The kernels of a call, and their arguments except for the number of rows (``count``).

        ``x``, ``out`` and ``other`` are addresses of contiguous rows; if ``other`` is 0, nothing is
        added. At ``spare`` is memory that is overwritten: ``spare_bytes`` for each row.
        """
        product = ProductCall.from_buffer_copy(self._call)
        product.x = x
        product.out = out
        product.other = other
        if self._convert is None:
            return [(self.kernel, product)]
        product.x = spare
        convert = ConvertCall(
            x=x,
            size=self.in_features,
            out=spare,
            out_stride=product.x_stride,
            tail=product.tail,
            outlier=OUTLIER,
            most_outliers=MOST_OUTLIERS,
            factors=_address(self._factors),
            group=product.group,
        )
        return [(self._convert, convert), (self.kernel, product)]

    def plus(self, x: Tensor, other: Tensor | None) -> Tensor:
        """The result, plus ``other`` [..., out_features] if there is one. With an activation,
        ``other`` [..., 2 * out_features] is added to gate and up."""
        assert x.dtype == self.dtype
        x = x.contiguous()
        # The kernel adds rows that are ``width`` wide. If ``other`` has narrower ones, torch adds
        # them. (Not so with an activation, where nothing is filled up: see fits_tiles.)
        if other is not None and self.width > self.out_features:
            return self.plus(x, None) + other
        out = torch.empty((*x.shape[:-1], self.width), dtype=x.dtype)
        if other is not None:
            other = self._in_order(other, out)  # it lives until the kernel ends
        rows = x.numel() // self.in_features
        spare = torch.empty(rows * self.spare_bytes, dtype=torch.uint8)
        calls = self.calls(
            x.data_ptr(), out=out.data_ptr(), other=_address(other), spare=spare.data_ptr()
        )
        for kernel, call in calls:
            call.count = rows
            kernel.run(call, torch.get_num_threads())
        return self.without_filling(out)

    def _in_order(self, other: Tensor, out: Tensor) -> Tensor:
        """``other`` as the kernel reads it: with an activation, 16 numbers of gate and 16 of up by
        turns, as the weight's columns are."""
        if self._call.activation:
            assert other.shape[-1] == 2 * self.width
            other = other.unflatten(-1, (2, -1, LANES)).transpose(-3, -2).flatten(-3)
        else:
            assert other.shape == out.shape
        return other.contiguous()

    def without_filling(self, out: Tensor) -> Tensor:
        """The rows of ``out`` without what they are filled up with."""
        if self.width == self.out_features:
            return out
        return out[..., : self.out_features].contiguous()


def _address(tensor: Tensor | None) -> int:
    """0: there is none."""
    return 0 if tensor is None else tensor.data_ptr()
