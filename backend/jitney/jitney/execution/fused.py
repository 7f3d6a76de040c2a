"""Fused modules for the CPU: what ``fuse`` puts in the place of a model's own.

Each computes what the module it replaces does, in fewer passes over memory and fewer calls, with
float32 inside and one rounding at the end. One engine's thread calls them: a module keeps the
argument block of its kernel between calls.

Imported only where Numba is (``fuse``).
"""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from jitney.execution import row_kernels
from jitney.execution.attention.openmp import team_runner
from jitney.execution.attention.simd import BF16, F32
from jitney.execution.compiled import compile_body, source_version
from jitney.execution.interface import AttentionCall, PagedFunction
from jitney.execution.linear import Activation, PackedLinear
from jitney.execution.panels import GatedPanels, PanelLinear

Run = Callable[[int, int, int], None]
"""run(body, arguments, threads), both of the first as addresses."""

_TAGS: dict[torch.dtype, Any] = {torch.float32: F32, torch.bfloat16: BF16}
_BYTES_PER_THREAD = 1 << 16
"""Below this, waking a second thread costs more than it saves."""


class Kernels:
    """The compiled bodies for one dtype, and how to run them."""

    def __init__(self, dtype: torch.dtype) -> None:
        """Compile, or load from Numba's cache."""
        tag = _TAGS[dtype]
        version = source_version("row_kernels.py", "attention/simd.py")

        def norm(arguments: int) -> None:
            if version != 0:
                row_kernels.norm_body(tag, arguments)

        def rotate(arguments: int) -> None:
            if version != 0:
                row_kernels.rotate_body(tag, arguments)

        self._functions = [compile_body(norm), compile_body(rotate)]  # they own the code
        self.norm, self.rotate = (int(function.address) for function in self._functions)
        self.run: Run = team_runner()


class _Launch:
    """One kernel with an argument block of its own.

    A step makes dozens of these launches, so what does not change is written once.
    """

    def __init__(self, run: Run, body: int, size: int) -> None:
        self.arguments = (ctypes.c_int64 * size)()
        self._run = run
        self._body = body
        self._address = ctypes.addressof(self.arguments)

    def set_float(self, index: int, value: float) -> None:
        """Write a float32 into argument ``index``."""
        ctypes.c_float.from_address(self._address + 8 * index).value = value

    def __call__(self, rows: int, row_bytes: int) -> None:
        """Run over so many rows, on as many threads as they are worth."""
        arguments = self.arguments
        arguments[row_kernels.COUNTER] = 0
        arguments[row_kernels.ROWS] = arguments[row_kernels.ROWS_PER_ITEM] = rows
        threads = 1 + rows * row_bytes // _BYTES_PER_THREAD
        if threads > 1:
            threads = min(torch.get_num_threads(), threads, rows)
            # A few items per thread, so that one that is held up does not hold up the others.
            arguments[row_kernels.ROWS_PER_ITEM] = -(-rows // (4 * threads))
        self._run(self._body, self._address, threads)


class FusedRMSNorm(nn.Module):
    """x / sqrt(mean(x²) + epsilon) * scale over the last dimension."""

    def __init__(self, scale: Tensor, epsilon: float, dtype: torch.dtype, kernels: Kernels) -> None:
        super().__init__()
        self.scale = scale.detach().float().contiguous()
        self.epsilon = epsilon
        self._width = scale.numel()
        self._dtype = dtype
        row_bytes = self._row_bytes = self._width * dtype.itemsize
        self._launch = _Launch(kernels.run, kernels.norm, row_kernels.NORM_ARGUMENTS)
        self._launch.set_float(row_kernels.EPSILON, epsilon)
        arguments = self._launch.arguments
        arguments[row_kernels.STRIDE] = arguments[row_kernels.OUT_STRIDE] = row_bytes
        arguments[row_kernels.WIDTH] = self._width
        arguments[row_kernels.SCALE] = self.scale.data_ptr()

    def forward(self, x: Tensor) -> Tensor:
        """x is [..., width] in the dtype of the model."""
        assert x.dtype == self._dtype
        x = x.contiguous()
        out = torch.empty_like(x)
        launch = self._launch
        launch.arguments[row_kernels.DATA] = x.data_ptr()
        launch.arguments[row_kernels.OUT] = out.data_ptr()
        launch(x.numel() // self._width, self._row_bytes)
        return out

    def write_call(self, arguments: np.ndarray, x: int, out: int) -> None:
        """Write the kernel's arguments for contiguous rows at these addresses: what does not depend
        on a step."""
        arguments[: row_kernels.NORM_ARGUMENTS] = self._launch.arguments
        arguments[row_kernels.DATA] = x
        arguments[row_kernels.OUT] = out


class HeadRotation:
    """Rotary embedding, and the norm of query and key heads before it, in place."""

    def __init__(
        self,
        query_heads: int,
        key_heads: int,
        head_size: int,
        norms: tuple[FusedRMSNorm, FusedRMSNorm] | None,
        dtype: torch.dtype,
        kernels: Kernels,
    ) -> None:
        self.dtype = dtype
        self._rotated = (query_heads + key_heads) * head_size
        self._norms = norms  # owns the memory of the scales
        self._launch = _Launch(kernels.run, kernels.rotate, row_kernels.ROTATE_ARGUMENTS)
        arguments = self._launch.arguments
        arguments[row_kernels.QUERY_HEADS] = query_heads
        arguments[row_kernels.KEY_HEADS] = key_heads
        arguments[row_kernels.HEAD_SIZE] = head_size
        if norms is not None:
            query_norm, key_norm = norms
            assert query_norm.epsilon == key_norm.epsilon
            self._launch.set_float(row_kernels.EPSILON, query_norm.epsilon)
            arguments[row_kernels.QUERY_SCALE] = query_norm.scale.data_ptr()
            arguments[row_kernels.KEY_SCALE] = key_norm.scale.data_ptr()

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor) -> None:
        """x is [1, T, features], contiguous: query heads, key heads, and what stays as it is. cos
        and sin are [1, T, rotary size], in x's dtype."""
        assert x.is_contiguous()
        assert cos.dtype == sin.dtype == x.dtype
        cos, sin = cos.contiguous(), sin.contiguous()
        size = x.element_size()
        _, rows, features = x.shape
        rotary = cos.shape[-1]
        arguments = self._launch.arguments
        arguments[row_kernels.DATA] = x.data_ptr()
        arguments[row_kernels.STRIDE] = features * size
        arguments[row_kernels.ROTARY_SIZE] = rotary
        arguments[row_kernels.COS] = cos.data_ptr()
        arguments[row_kernels.SIN] = sin.data_ptr()
        arguments[row_kernels.ANGLE_STRIDE] = rotary * size
        self._launch(rows, self._rotated * size)

    def write_call(self, arguments: np.ndarray, x: int, stride: int) -> None:
        """Write the kernel's arguments for rows at ``x``, ``stride`` elements apart: what does not
        depend on a step."""
        arguments[: row_kernels.ROTATE_ARGUMENTS] = self._launch.arguments
        arguments[row_kernels.DATA] = x
        arguments[row_kernels.STRIDE] = stride * self.dtype.itemsize


class FusedMLP(nn.Module):
    """down(activation(gate(x)) * up(x)): three products, the rest in their epilogues."""

    def __init__(
        self, gate: PackedLinear, up: PackedLinear, down: PackedLinear, activation: Activation
    ) -> None:
        super().__init__()
        self.gate, self.up, self.down = gate, up, down
        self._activation: Activation = activation
        self._gate, self._up = gate.activated, up.times
        self._down, self._down_plus = down.forward, down.plus

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """x and ``residual``, which is added to the result, are [..., hidden size]."""
        inner = self._up(x, self._gate(x, self._activation))
        return self._down(inner) if residual is None else self._down_plus(inner, residual)


@dataclass(frozen=True)
class AttentionForm:
    """How a layer calls attention: what an :class:`interface.AttentionCall` has beside tensors."""

    layer: int
    query_heads: int
    key_heads: int
    head_size: int
    scale: float
    window: int | None
    softcap: float | None
    sinks: Tensor | None


class FusedDecoderLayer(nn.Module):
    """A pre-norm layer with one matrix for query, key and value, rotary embedding and a gated MLP.

    The sums of the two residual branches are computed in the epilogues of the products that end
    them. Attention is called as the replaced module would have called it.
    """

    is_causal = True

    def __init__(
        self,
        form: AttentionForm,
        attention_norm: FusedRMSNorm,
        qkv: PackedLinear | PanelLinear,
        rotation: HeadRotation,
        output: PackedLinear | PanelLinear,
        mlp_norm: FusedRMSNorm,
        mlp: FusedMLP | GatedPanels,
        kernels: Kernels,
    ) -> None:
        super().__init__()
        self.form, self.kernels, self.rotation = form, kernels, rotation
        self.dtype = rotation.dtype
        self.attention_norm, self.qkv, self.output = attention_norm, qkv, output
        self.mlp_norm, self.mlp = mlp_norm, mlp
        self._parts = [form.query_heads, form.key_heads, form.key_heads]
        self._heads = (-1, sum(self._parts), form.head_size)
        self._constants: dict[str, Any] = {
            "module": qkv,  # of no meaning to our attention
            "layer": form.layer,
            "mask": None,
            "scale": form.scale,
            "window": form.window,
            "softcap": form.softcap,
            "sinks": form.sinks,
            "extra": {},
        }
        # Bound once: a submodule's lookup and call cost as much as a small kernel.
        self._attention_norm, self._mlp_norm = attention_norm.forward, mlp_norm.forward
        self._qkv, self._output, self._mlp = qkv.forward, output.plus, mlp.forward

    def forward(
        self,
        hidden_states: Tensor,
        *,
        position_embeddings: tuple[Tensor, Tensor],
        paged: PagedFunction,
        **unused: object,
    ) -> Tensor:
        """``hidden_states`` is [1, T, hidden size]; so is the result."""
        return self.run(hidden_states, *position_embeddings, paged)

    def run(self, hidden: Tensor, cos: Tensor, sin: Tensor, paged: PagedFunction) -> Tensor:
        """:meth:`forward` for a caller that has nothing else to say."""
        x = self._qkv(self._attention_norm(hidden))
        self.rotation(x, cos, sin)
        query, key, value = torch.split_with_sizes(x.view(self._heads), self._parts, 1)
        attended = paged(AttentionCall(query=query, key=key, value=value, **self._constants))
        hidden = self._output(attended.view(1, attended.shape[0], -1), hidden)
        return self._mlp(self._mlp_norm(hidden), hidden)
