"""Linear layers by our own kernels: packs their weights, and calls the kernels.

x and the result are bfloat16 with weights of bfloat16, int8 or 4 bits, and float32 with weights of
float32. Which kernels a weight needs::

    weight      tag            before it (``rounding_kernel``)    then
    float32     F32            nothing                            ``product_kernel``
    bfloat16    BF16           nothing                            ``product_kernel``
    bfloat16    WIDE (no       x is widened to float32            ``product_kernel``
                instruction)
    int8        I8             rows of bytes with a tail          ``product_kernel``
    4 bits      I4             groups of bytes                    ``four_bit_kernel``

Called by ``layer_kernels``, which makes a :class:`TileLinear` for a fused module, and by
``program``, where its kernels are steps of their own. Imported only where Numba is.
"""

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from jitney.execution.quantized import MOST_OUTLIERS, OUTLIER
from jitney.kernels.cpu.compiled import Kernel, KernelCall, source_version
from jitney.kernels.cpu.emit import LANES, UNIT_BYTES, host_has
from jitney.kernels.cpu.four_bit_kernel import groups_body
from jitney.kernels.cpu.processor import may_use_amx, must_widen_bf16
from jitney.kernels.cpu.product_kernel import (
    ACTIVATIONS,
    ITEMS,
    STEP_BYTES,
    ProductCall,
    product_body,
)
from jitney.kernels.cpu.rounding_kernel import (
    OUTLIER_BYTES,
    TAIL_INDICES,
    ConvertCall,
    convert_body,
)
from jitney.kernels.cpu.simd import BF16, F32, I4, I8, WIDE
from jitney.kernels.fused.forms import Activation

_PAIR = 2 * LANES
"""Outputs of two columns."""
_FACTOR_BYTES = 8
"""For each group of a row of x: its scale and its sum."""
_LEAST_FACTORS = 32
"""Bytes behind a row of x, at least: a step may read so far beyond a group of 32 inputs."""
_INPUTS = {torch.bfloat16: 32, torch.float32: 16, torch.int8: 16, torch.uint8: 16}
"""The second size of a weight of this dtype must be a multiple of so many. (Nibbles are uint8, two
in each.)"""


# ``typed``, here and below: tags are all 0, so they are equal, and only their types differ.
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
    """Whether a :class:`TileLinear` can have this weight and ``activation``; with an activation,
    ``weight`` is that of gate and up."""
    inputs = _INPUTS.get(weight.dtype)
    if inputs is None or not host_has("avx2"):
        return False
    if activation not in ACTIVATIONS or weight.shape[1] % inputs != 0:
        return False
    # Outputs are filled up to whole pairs of columns. Not those of gate and up: between the two
    # there would be a gap.
    return activation is None or weight.shape[0] % (2 * _PAIR) == 0


# --------------------------------------------------------------------------- packed weights


@dataclass(frozen=True)
class _PackedWeight:
    """A weight as a kernel reads it, and what the kernel must know of it."""

    tag: Any
    """Of the product."""
    columns: Tensor
    """[N / 16, ...]: the memory of each column, in order."""
    steps: int
    """See :class:`ProductCall`."""
    x_stride: int
    """Bytes of a row of x as the product reads it."""
    before: Any = None
    """The tag of the rounding kernel that makes these rows. None: they are x itself."""
    group: int = 0
    of_outputs: dict[str, Tensor] = field(default_factory=dict)
    """Tensors with one number for each output, by their field in :class:`ProductCall`."""


# In all functions here, ``filling`` is the number of outputs that are added, as zeros, so that
# there are whole pairs of columns.


def _pack_floats(weight: Tensor, filling: int) -> _PackedWeight:
    """A weight of bfloat16 or of float32."""
    step = STEP_BYTES // weight.itemsize
    filled = _fill_up(weight, step, filling)
    inputs = filled.shape[1]
    columns = _columns(filled)
    steps = inputs // step
    if weight.dtype == torch.float32:
        return _PackedWeight(F32, columns, steps, x_stride=4 * inputs)
    if must_widen_bf16():
        return _PackedWeight(WIDE, columns, steps, x_stride=4 * inputs, before=F32)
    return _PackedWeight(BF16, columns, steps, x_stride=2 * inputs)


def _pack_bytes(weight: Tensor, scale: Tensor, filling: int) -> _PackedWeight:
    """A weight of int8."""
    filled = _fill_up(weight, STEP_BYTES, filling)
    # In pieces: each is copied as int32.
    sums = [128 * piece.sum(1, dtype=torch.int32) for piece in filled.split(1024)]
    scales = functional.pad(scale.detach().float().view(-1), (0, filling))
    return _PackedWeight(
        tag=I8,
        columns=_columns(filled),
        steps=filled.shape[1] // STEP_BYTES,
        x_stride=filled.shape[1] + TAIL_INDICES + OUTLIER_BYTES * MOST_OUTLIERS,
        before=I8,
        of_outputs={"scales": scales, "shifts": torch.cat(sums)},
    )


def _pack_nibbles(weight: Tensor, scale: Tensor, filling: int) -> _PackedWeight:
    """A weight of 4 bits: ``weight`` uint8 [N, K / 2], ``scale`` bfloat16 [2, N, groups]."""
    inputs = 2 * weight.shape[1]
    groups = scale.shape[2]
    columns = _columns_of_nibbles(weight, scale, filling)
    return _PackedWeight(
        tag=I4,
        columns=columns,
        steps=columns[0].numel(),
        x_stride=inputs + max(_LEAST_FACTORS, _FACTOR_BYTES * groups),
        before=I4,
        group=inputs // groups,
    )


def _fill_up(weight: Tensor, step: int, filling: int) -> Tensor:
    """The weight with zeros behind its inputs, up to whole steps, and behind its outputs."""
    filled = weight.detach().contiguous()  # GPT-2's are transposed
    more_inputs = -weight.shape[1] % step
    if filling or more_inputs:  # else it would be copied
        filled = functional.pad(filled, (0, more_inputs, 0, filling))
    return filled


def _columns(filled: Tensor) -> Tensor:
    """[N / 16, units, 16, elements of a unit] of a weight [N, K]."""
    unit = UNIT_BYTES // filled.itemsize
    return filled.view(len(filled) // LANES, LANES, -1, unit).permute(0, 2, 1, 3)


def _columns_of_nibbles(weight: Tensor, scale: Tensor, filling: int) -> Tensor:
    """uint8 [N / 16, bytes of a column], as ``four_bit_kernel`` reads them."""
    weight = functional.pad(weight, (0, 0, 0, filling))
    values = torch.stack((weight & 15, weight >> 4), -1)  # [N, K / 2, 2], which is [N, K]
    # 8 inputs, for 16 outputs, are two vectors of bytes: 4 inputs, then the next 4. These become
    # the low and the high nibbles of one vector.
    eights = values.view(-1, LANES, weight.shape[1] // 4, 2, 4)  # [N / 16, 16, K / 8, 2, 4]
    low, high = eights.permute(3, 0, 2, 1, 4)  # [N / 16, K / 8, 16, 4] each
    columns = len(eights)
    groups = scale.shape[2]
    vectors = (low | high << 4).reshape(columns, groups, -1)
    factors = functional.pad(scale, (0, 0, 0, filling)).view(2, columns, LANES, groups)
    factors = factors.permute(1, 3, 2, 0).contiguous()  # [N / 16, groups, 16, 2]
    factor_bytes = factors.view(torch.uint8).view(columns, groups, -1)
    return torch.cat((factor_bytes, vectors), 2).flatten(1)


def _interleave(columns: Tensor, gated: bool) -> Tensor:
    """The columns, contiguous; if ``gated``, those of gate and of up by turns instead of one above
    the other, so that a pair has 16 outputs of each."""
    if gated:
        columns = columns.unflatten(0, (2, -1)).transpose(0, 1)
    return columns.contiguous()


# --------------------------------------------------------------------------- the layer


class TileLinear(nn.Module):
    """``x @ weight.T + bias`` in bfloat16, or in float32; sums are float32, of the inputs in their
    order, rounded once at the end.

    With an activation, ``weight`` [2 N, K] is that of a gate and of what it is multiplied with, one
    above the other, and the result [..., N] is ``activation(gate) * up``.

    A weight of int8 has a float32 ``scale`` [N] for each output; each row of x is rounded to bytes
    of a scale of its own, but for outliers, and the sums of their products are exact; ``factors``
    are those of ``quantization.eight_bits``. One of 4 bits is as ``quantization.four_bits`` has it,
    with its ``scale``.
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
        has_nibbles = weight.dtype == torch.uint8
        outputs = weight.shape[0]
        filling = -outputs % _PAIR
        width = outputs + filling
        self.in_features = weight.shape[1] * (2 if has_nibbles else 1)
        self.out_features = outputs // 2 if gated else outputs
        self.width = width // 2 if gated else width
        """Of a row of results: ``out_features`` filled up to whole pairs."""
        self.dtype = torch.float32 if weight.dtype == torch.float32 else torch.bfloat16
        """Of x and the result."""
        if scale is None:
            packed = _pack_floats(weight, filling)
        elif has_nibbles:
            packed = _pack_nibbles(weight, scale, filling)
        else:
            packed = _pack_bytes(weight, scale, filling)
        self.kernel = product_kernel(packed.tag)
        self._before = None if packed.before is None else convert_kernel(packed.before)
        self.spare_bytes = 0 if packed.before is None else packed.x_stride
        """Bytes that :meth:`calls` needs for each row of x, for the rows that it makes of them."""
        self._factors = factors
        # These tensors own the memory that the arguments point to.
        self._packed = {"weight": _interleave(packed.columns, gated)}
        of_outputs = dict(packed.of_outputs)
        if bias is not None:
            of_outputs["bias"] = functional.pad(bias.detach().float(), (0, filling))
        for name, numbers in of_outputs.items():
            self._packed[name] = _interleave(numbers.view(-1, LANES), gated)
        pairs = width // _PAIR
        self._call = ProductCall(
            x_stride=packed.x_stride,
            steps=packed.steps,
            size=self.in_features,
            group=packed.group,
            pairs=pairs,
            pairs_per_item=max(1, pairs // ITEMS),
            out_stride=self.dtype.itemsize * self.width,
            activation=ACTIVATIONS[activation],
            tiles=int(may_use_amx() and self.dtype == torch.bfloat16),
            **{name: tensor.data_ptr() for name, tensor in self._packed.items()},
        )

    def forward(self, x: Tensor) -> Tensor:
        """x is [..., in_features]."""
        return self.plus(x, None)

    def calls(self, x: int, *, out: int, other: int, spare: int) -> list[tuple[Kernel, KernelCall]]:
        """Kernels and their arguments for contiguous rows at these addresses, except the number of
        rows (``count``). An ``other`` of 0 is none; ``spare`` has ``spare_bytes`` for each row."""
        call = ProductCall.from_buffer_copy(self._call)
        call.x = x
        call.out = out
        call.other = other
        if self._before is None:
            return [(self.kernel, call)]
        call.x = spare
        convert = ConvertCall(
            x=x,
            size=self.in_features,
            out=spare,
            out_stride=call.x_stride,
            group=call.group,
            tail=call.steps * STEP_BYTES,
            outlier=OUTLIER,
            most_outliers=MOST_OUTLIERS,
            factors=0 if self._factors is None else self._factors.data_ptr(),
        )
        return [(self._before, convert), (self.kernel, call)]

    def plus(self, x: Tensor, other: Tensor | None) -> Tensor:
        """The result, plus ``other`` [..., out_features] if there is one. With an activation,
        ``other`` [..., 2 out_features] is added to gate and up."""
        assert x.dtype == self.dtype
        x = x.contiguous()
        # The kernel would read rows of ``other`` that are ``width`` wide.
        if other is not None and self.width > self.out_features:
            return self.plus(x, None) + other
        out = torch.empty((*x.shape[:-1], self.width), dtype=x.dtype)
        address = 0
        if other is not None:
            other = self._as_columns(other, out)  # it lives until the kernel ends
            address = other.data_ptr()
        rows = x.numel() // self.in_features
        spare = torch.empty(rows * self.spare_bytes, dtype=torch.uint8)
        calls = self.calls(x.data_ptr(), out=out.data_ptr(), other=address, spare=spare.data_ptr())
        for kernel, call in calls:
            call.count = rows
            kernel.run(call, torch.get_num_threads())
        return self.without_filling(out)

    def _as_columns(self, other: Tensor, out: Tensor) -> Tensor:
        """``other`` as the kernel reads it: if there is an activation, 16 numbers of gate and 16 of
        up by turns, as the weight's columns are."""
        if self._call.activation:
            other = other.unflatten(-1, (2, -1, LANES)).transpose(-3, -2).flatten(-3)
            assert other.shape[-1] == 2 * self.width
        else:
            assert other.shape == out.shape
        return other.contiguous()

    def without_filling(self, out: Tensor) -> Tensor:
        """The rows of ``out`` without what they are filled up with."""
        if self.width == self.out_features:
            return out
        return out[..., : self.out_features].contiguous()
