"""Fused modules for the CPU: what ``fuse`` puts in the place of a model's own.

Each computes what the module it replaces does, in fewer passes over memory and fewer calls, with
float32 inside and one rounding at the end. One engine's thread calls them: a module keeps the
argument block of its kernel between calls.

Imported only where Numba is (``fuse``).
"""

import hashlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numba import cfunc, types
from torch import Tensor, nn

from jitney.execution import row_kernels
from jitney.execution.attention.openmp import team_runner
from jitney.execution.attention.simd import BF16, F32
from jitney.execution.interface import AttentionCall, PagedFunction
from jitney.execution.linear import Activation, PackedLinear

_log = logging.getLogger(__name__)

Run = Callable[[int, int, int], None]
"""run(body, arguments, threads), both of the first as addresses."""

_TAGS: dict[torch.dtype, Any] = {torch.float32: F32, torch.bfloat16: BF16}
_BYTES_PER_THREAD = 1 << 16
"""Below this, waking a second thread costs more than it saves."""


class Kernels:
    """The compiled bodies for one dtype, and how to run them."""

    def __init__(self, dtype: torch.dtype) -> None:
        """Compile, or load from Numba's cache."""
        tag, version = _TAGS[dtype], _source_version()

        def norm(arguments: int) -> None:
            if version != 0:
                row_kernels.norm_body(tag, arguments)

        def rotate(arguments: int) -> None:
            if version != 0:
                row_kernels.rotate_body(tag, arguments)

        self._functions = [_compile(norm), _compile(rotate)]  # they own the code
        self.norm, self.rotate = (int(function.address) for function in self._functions)
        self.run: Run = team_runner()


def _compile(body: Callable[[int], None]) -> Any:
    options: Any = {"error_model": "numpy", "boundscheck": False}
    signature = types.void(types.intp)
    try:
        return cfunc(signature, cache=True, **options)(body)
    except RuntimeError as error:
        if "no locator" not in str(error):  # no writable folder for the cache
            raise
        _log.warning("the kernels of rows are compiled anew at each load: %s", error)
        return cfunc(signature, **options)(body)


def _source_version() -> int:
    """A part of the cache's key that changes with the kernels' sources; never 0.

    Numba's cache sees changes of the file that defines the compiled function only. A closure
    variable is part of the key.
    """
    digest = hashlib.sha256()
    here = Path(__file__).parent
    for path in (here / "row_kernels.py", here / "attention" / "simd.py"):
        digest.update(path.read_bytes())
    return int.from_bytes(digest.digest()[:7], "little") | 1


def _launch(run: Run, body: int, arguments: np.ndarray, rows: int, row_bytes: int) -> None:
    """Run ``body`` over ``rows`` rows, on as many threads as they are worth."""
    threads = min(torch.get_num_threads(), rows, 1 + rows * row_bytes // _BYTES_PER_THREAD)
    arguments[row_kernels.COUNTER] = 0
    arguments[row_kernels.ROWS] = rows
    # A few items per thread, so that one that is held up does not hold up the others.
    arguments[row_kernels.ROWS_PER_ITEM] = rows if threads == 1 else -(-rows // (4 * threads))
    run(body, arguments.ctypes.data, threads)


class FusedRMSNorm(nn.Module):
    """x / sqrt(mean(x²) + epsilon) * scale over the last dimension."""

    def __init__(self, scale: Tensor, epsilon: float, dtype: torch.dtype, kernels: Kernels) -> None:
        super().__init__()
        self.scale = scale.detach().float().contiguous()
        self.epsilon = epsilon
        self._dtype = dtype
        self._kernels = kernels
        self._arguments = np.zeros(row_kernels.NORM_ARGUMENTS, np.int64)
        self._arguments.view(np.float32)[2 * row_kernels.EPSILON] = epsilon
        self._arguments[row_kernels.SCALE] = self.scale.data_ptr()
        self._arguments[row_kernels.WIDTH] = self.scale.numel()

    def forward(self, x: Tensor) -> Tensor:
        """x is [..., width] in the dtype of the model."""
        assert x.dtype == self._dtype
        x = x.contiguous()
        out = torch.empty_like(x)
        width = x.shape[-1]
        row_bytes = width * x.element_size()
        arguments = self._arguments
        arguments[row_kernels.DATA : row_kernels.WIDTH] = (
            x.data_ptr(),
            row_bytes,
            out.data_ptr(),
            row_bytes,
        )
        kernels = self._kernels
        _launch(kernels.run, kernels.norm, arguments, x.numel() // width, row_bytes)
        return out


class HeadRotation(nn.Module):
    """Rotary embedding, and the norm of query and key heads before it, in place."""

    def __init__(
        self,
        query_heads: int,
        key_heads: int,
        head_size: int,
        norms: tuple[FusedRMSNorm, FusedRMSNorm] | None,
        kernels: Kernels,
    ) -> None:
        super().__init__()
        self._rotated = (query_heads + key_heads) * head_size
        self._norms = norms  # owns the memory of the scales
        self._kernels = kernels
        self._arguments = np.zeros(row_kernels.ROTATE_ARGUMENTS, np.int64)
        self._arguments[row_kernels.QUERY_HEADS : row_kernels.ROTARY_SIZE] = (
            query_heads,
            key_heads,
            head_size,
        )
        if norms is not None:
            assert norms[0].epsilon == norms[1].epsilon
            self._arguments.view(np.float32)[2 * row_kernels.EPSILON] = norms[0].epsilon
            self._arguments[row_kernels.QUERY_SCALE :] = [n.scale.data_ptr() for n in norms]

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> None:
        """x is [1, T, features], contiguous: query heads, key heads, and what stays as it is. cos
        and sin are [1, T, rotary size], in x's dtype."""
        assert x.is_contiguous()
        assert cos.dtype == sin.dtype == x.dtype
        cos, sin = cos.contiguous(), sin.contiguous()
        size = x.element_size()
        arguments = self._arguments
        arguments[row_kernels.DATA] = x.data_ptr()
        arguments[row_kernels.STRIDE] = x.shape[-1] * size
        arguments[row_kernels.ROTARY_SIZE : row_kernels.QUERY_SCALE] = (
            cos.shape[-1],
            cos.data_ptr(),
            sin.data_ptr(),
            cos.shape[-1] * size,
        )
        kernels = self._kernels
        _launch(kernels.run, kernels.rotate, arguments, x.shape[1], self._rotated * size)


class FusedMLP(nn.Module):
    """down(activation(gate(x)) * up(x)): three products, the rest in their epilogues."""

    def __init__(
        self, gate: PackedLinear, up: PackedLinear, down: PackedLinear, activation: Activation
    ) -> None:
        super().__init__()
        self.gate, self.up, self.down = gate, up, down
        self._activation: Activation = activation

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """x and ``residual``, which is added to the result, are [..., hidden size]."""
        inner = self.up.times(x, self.gate.activated(x, self._activation))
        return self.down(inner) if residual is None else self.down.plus(inner, residual)


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
        qkv: PackedLinear,
        rotation: HeadRotation,
        output: PackedLinear,
        mlp_norm: FusedRMSNorm,
        mlp: FusedMLP,
    ) -> None:
        super().__init__()
        self._form = form
        self._parts = [form.query_heads, form.key_heads, form.key_heads]
        self._heads = (-1, sum(self._parts), form.head_size)
        self.attention_norm = attention_norm
        self.qkv = qkv
        self.rotation = rotation
        self.output = output
        self.mlp_norm = mlp_norm
        self.mlp = mlp

    def forward(
        self,
        hidden_states: Tensor,
        *,
        position_embeddings: tuple[Tensor, Tensor],
        paged: PagedFunction,
        **unused: object,
    ) -> Tensor:
        """``hidden_states`` is [1, T, hidden size]; so is the result."""
        form = self._form
        x = self.qkv(self.attention_norm(hidden_states))
        self.rotation(x, *position_embeddings)
        query, key, value = x.view(self._heads).split(self._parts, 1)
        attended = paged(
            AttentionCall(
                module=self,
                layer=form.layer,
                query=query,
                key=key,
                value=value,
                mask=None,
                scale=form.scale,
                window=form.window,
                softcap=form.softcap,
                sinks=form.sinks,
                extra={},
            )
        )
        # The epilogue wants the sum's other operand in the very shape of the product.
        hidden = self.output.plus(attended.reshape(1, attended.shape[0], -1), hidden_states)
        return self.mlp(self.mlp_norm(hidden), hidden)
