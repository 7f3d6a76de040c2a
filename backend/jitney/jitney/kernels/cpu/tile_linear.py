"""Linear layers by ``product_kernel`` and ``groups``, in bfloat16 of weights in bfloat16, int8 or 4
bits, and in float32: the kernels that they need, and their weights as these read them. Imported
only where Numba is.
"""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from jitney.execution.quantized import MOST_OUTLIERS, OUTLIER
from jitney.kernels.cpu.compiled import Call, Kernel, source_version
from jitney.kernels.cpu.groups import groups_body
from jitney.kernels.cpu.product_kernel import (
    ACTIVATIONS,
    ITEMS,
    STEP_BYTES,
    ProductCall,
    product_body,
)
from jitney.kernels.cpu.products import may_use_amx, widens
from jitney.kernels.cpu.rows import ConvertCall, convert_body
from jitney.kernels.cpu.simd import BF16, F32, I4, I8, LANES, UNIT_BYTES, WIDE, host_has
from jitney.kernels.fused.forms import Activation


@lru_cache(typed=True)  # tags of all types are equal
def product_kernel(tag: Any) -> Kernel:
    """Of weights of the tag's type; compiled, or found in Numba's cache, at its first use."""
    version = source_version()
    if tag is I4:
        return Kernel(lambda address: groups_body(I4, address) if version else None)
    return Kernel(lambda address: product_body(tag, address) if version else None)


@lru_cache(typed=True)
def convert_kernel(tag: Any) -> Kernel:
    """What makes of bfloat16 the rows of products of the tag's type."""
    version = source_version()
    return Kernel(lambda address: convert_body(tag, address) if version else None)


def fits_tiles(weight: Tensor, activation: Activation | None = None) -> bool:
    """Whether there is a product of its dtype here, its sizes can be those of whole tiles, and the
    ``activation`` is one of the kernel's; with one, ``weight`` is that of gate and up. Rows of
    bytes are filled up, and so are outputs without an activation. Nibbles are uint8, two in each.
    """
    inputs = {torch.bfloat16: 32, torch.float32: 16, torch.int8: 16, torch.uint8: 16}.get(
        weight.dtype
    )
    if inputs is None or not host_has("avx2"):
        return False
    whole = activation is None or weight.shape[0] % 64 == 0
    return whole and weight.shape[1] % inputs == 0 and activation in ACTIVATIONS


class TileLinear(nn.Module):
    """``x @ weight.T + bias`` in bfloat16, or in float32; sums are float32, of the inputs in their
    order, rounded once at the end.

    With an activation, ``weight`` [2 N, K] is that of a gate and of what it is multiplied with, one
    above the other, and the result [..., N] is ``activation(gate) * up``.

    A weight of int8 has a float32 ``scale`` [N] for each output; each row of x is rounded to bytes
    of a scale of its own, but for outliers, and the sums of their products are exact; ``factors``
    are those of ``quantization.eight_bits``. One of 4 bits is as
    ``quantization.four_bits`` has it, with its ``scale``.
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
        nibbles = weight.dtype == torch.uint8
        outputs, self.in_features = weight.shape[0], weight.shape[1] * (2 if nibbles else 1)
        self.out_features = outputs if activation is None else outputs // 2
        gated, more = activation is not None, -outputs % (2 * LANES)
        outputs += more
        self.width = outputs // 2 if gated else outputs
        """Of a row of results, filled up with zeros."""
        self.dtype = torch.float32 if weight.dtype == torch.float32 else torch.bfloat16
        """Of x and the result."""
        tag: Any
        before: Any = None
        if self.dtype == torch.float32:
            tag = F32
        elif scale is None:
            tag, before = (WIDE, F32) if widens() else (BF16, None)
        else:
            tag = before = I4 if nibbles else I8
        self.kernel = product_kernel(tag)
        self._before = None if before is None else convert_kernel(before)
        size = 4 if scale is None and widens() else 1 if nibbles else weight.itemsize
        step = 1 if nibbles else STEP_BYTES // weight.itemsize
        stride, self._group = (self.in_features + -self.in_features % step) * size, 0
        if scale is not None and not nibbles:
            stride += 8 + 8 * MOST_OUTLIERS
        if nibbles:
            assert scale is not None
            self._group = self.in_features // scale.shape[2]
            columns = _columns_of_nibbles(weight, scale, more)
            stride += max(32, 8 * scale.shape[2])  # a tile may read so far beyond a group of 32
        else:
            filled = weight.detach().contiguous()  # GPT-2's are transposed
            if more or self.in_features % step:  # else it would be copied
                filled = functional.pad(filled, (0, -self.in_features % step, 0, more))
            unit = UNIT_BYTES // weight.itemsize
            columns = filled.view(outputs // LANES, LANES, -1, unit).permute(0, 2, 1, 3)
        packed = {"weight": _interleave(columns, gated)}
        if bias is not None:
            filled_bias = functional.pad(bias.detach().float(), (0, more))
            packed["bias"] = _interleave(filled_bias.view(-1, LANES), gated)
        if scale is not None and not nibbles:
            filled_scale = functional.pad(scale.detach().float().view(-1), (0, more))
            packed["scales"] = _interleave(filled_scale.view(-1, LANES), gated)
            # In parts: each is copied as int32.
            sums = [128 * part.sum(1, dtype=torch.int32) for part in filled.split(1024)]
            packed["shifts"] = _interleave(torch.cat(sums).view(-1, LANES), gated)
        self._packed, self._factors = packed, factors
        self.spare_bytes = 0 if self._before is None else stride
        """For each row of x: see :meth:`calls`."""
        pairs = outputs // (2 * LANES)
        self._call = ProductCall(
            x_stride=stride,
            steps=columns[0].numel() if nibbles else -(-self.in_features // step),
            size=self.in_features,
            group=self._group,
            pairs=pairs,
            pairs_per_item=max(1, pairs // ITEMS),
            out_stride=self.dtype.itemsize * self.width,
            activation=ACTIVATIONS[activation],
            tiles=int(may_use_amx() and self.dtype == torch.bfloat16),
            **{name: each.data_ptr() for name, each in packed.items()},
        )

    def forward(self, x: Tensor) -> Tensor:
        """x is [..., in_features]."""
        return self.plus(x, None)

    def calls(self, x: int, out: int, other: int, spare: int) -> list[tuple[Kernel, Call]]:
        """Kernels and their arguments for contiguous rows at these addresses; 0 is no ``other``,
        and ``spare`` has room for ``spare_bytes`` for each row. The number of rows is left to be
        set."""
        call = ProductCall.from_buffer_copy(self._call)
        call.x, call.out, call.other = x, out, other
        if self._before is None:
            return [(self.kernel, call)]
        call.x = spare
        first = ConvertCall(
            x=x,
            size=self.in_features,
            out=call.x,
            out_stride=call.x_stride,
            group=self._group,
            tail=call.steps * STEP_BYTES,
            outlier=OUTLIER,
            most_outliers=MOST_OUTLIERS,
            factors=0 if self._factors is None else self._factors.data_ptr(),
        )
        return [(self._before, first), (self.kernel, call)]

    def plus(self, x: Tensor, other: Tensor | None) -> Tensor:
        """The result, plus ``other`` [..., out_features] if there is one. With an activation,
        ``other`` [..., 2 out_features] is added to gate and up."""
        assert x.dtype == self.dtype
        x = x.contiguous()
        out = torch.empty((*x.shape[:-1], self.width), dtype=x.dtype)
        if other is not None and self.width > self.out_features:
            return self.plus(x, None) + other
        if other is not None:
            if self._call.activation:
                other = other.unflatten(-1, (2, -1, LANES)).transpose(-3, -2).flatten(-3)
                assert other.shape[-1] == 2 * self.width
            else:
                assert other.shape == out.shape
            other = other.contiguous()
        rows = x.numel() // self.in_features
        spare = torch.empty(rows * self.spare_bytes, dtype=torch.uint8)
        places = x.data_ptr(), out.data_ptr(), 0 if other is None else other.data_ptr()
        for kernel, call in self.calls(*places, spare.data_ptr()):
            call.count = rows
            kernel.run(call, torch.get_num_threads())
        return self.without_filling(out)

    def without_filling(self, out: Tensor) -> Tensor:
        """Rows of results as wide as they are."""
        whole = self.width == self.out_features
        return out if whole else out[..., : self.out_features].contiguous()


def _columns_of_nibbles(weight: Tensor, scale: Tensor, more: int) -> Tensor:
    """uint8 [N / 16, bytes of a column], as ``groups`` reads them, with so many more outputs."""
    weight = functional.pad(weight, (0, 0, 0, more))
    values = torch.stack((weight & 15, weight >> 4), -1).view(-1, LANES, weight.shape[1] // 4, 2, 4)
    low, high = values.permute(3, 0, 2, 1, 4)
    count = scale.shape[2]
    vectors = (low | high << 4).reshape(len(values), count, -1)
    factors = functional.pad(scale, (0, 0, 0, more)).view(2, -1, LANES, count).permute(1, 3, 2, 0)
    pairs = factors.contiguous().view(torch.uint8).view(len(values), count, -1)
    return torch.cat((pairs, vectors), 2).flatten(1)


def _interleave(columns: Tensor, gated: bool) -> Tensor:
    """Contiguous; the columns of gate and up by turns."""
    if gated:
        columns = columns.unflatten(0, (2, -1)).transpose(0, 1)
    return columns.contiguous()
