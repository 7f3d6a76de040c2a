"""Norms and rotary embedding over the rows of a step, on torch's threads (``row_kernels``).

One engine's thread calls them: each keeps its kernel's arguments between calls. Imported only where
Numba is.
"""

import torch
from torch import Tensor

from jitney.execution.interface import PagedFunction
from jitney.kernels.cpu.compiled import Kernel
from jitney.kernels.cpu.row_kernels import NormCall, RotateCall
from jitney.kernels.fused.layers import AttentionForm, HeadNorms, Misfit, NormForm

_BYTES_PER_THREAD = 1 << 16
"""Below this, waking a second thread costs more than it saves."""


class RowNorm:
    """The RMS norm of rows in the dtype of the model."""

    def __init__(self, form: NormForm, dtype: torch.dtype, kernel: Kernel) -> None:
        self.form, self.kernel = form, kernel  # the form owns the memory of the scale
        self._dtype, self._width = dtype, form.scale.numel()
        self._row_bytes = self._width * dtype.itemsize
        self._call = NormCall(epsilon=form.epsilon, width=self._width, scale=form.scale.data_ptr())

    def __call__(self, x: Tensor) -> Tensor:
        """A new tensor; x is [..., width]."""
        x = x.contiguous()
        out = torch.empty_like(x)
        self._run(x, out, x.numel() // self._width, self._row_bytes)
        return out

    def in_place(self, x: Tensor) -> None:
        """x is [T, width], perhaps a part of the columns of a larger tensor."""
        self._run(x, x, x.shape[0], x.stride(0) * x.element_size())

    def call_for(self, x: int, out: int) -> NormCall:
        """The kernel's arguments for contiguous rows at these addresses, but for their number."""
        call = NormCall.from_buffer_copy(self._call)
        call.data, call.out = x, out
        call.stride = call.out_stride = self._row_bytes
        return call

    def _run(self, x: Tensor, out: Tensor, rows: int, stride: int) -> None:
        assert x.dtype == self._dtype
        assert x.shape[-1] == self._width
        call = self.call_for(x.data_ptr(), out.data_ptr())
        call.stride = call.out_stride = stride
        _run_rows(self.kernel, call, rows, self._row_bytes)


class CpuHeadAttention:
    """Norms of query and key heads if there are any, rotary embedding, attention."""

    def __init__(
        self, form: AttentionForm, norms: HeadNorms | None, dtype: torch.dtype, kernel: Kernel
    ) -> None:
        self.form, self.dtype, self.kernel = form, dtype, kernel
        self._row_bytes = (form.query_heads + form.key_heads) * form.head_size * dtype.itemsize
        self._call = RotateCall(
            query_heads=form.query_heads, key_heads=form.key_heads, head_size=form.head_size
        )
        self._norms = norms  # owns the memory of the scales
        self.wide_norms: list[RowNorm] = []
        """Those of query and key over all heads."""
        if norms is not None and norms.query.form.scale.numel() > form.head_size:
            self.wide_norms = [norm.kernel for norm in norms if isinstance(norm.kernel, RowNorm)]
        elif norms is not None:
            self._call.epsilon = norms.query.form.epsilon
            self._call.query_scale = norms.query.form.scale.data_ptr()
            self._call.key_scale = norms.key.form.scale.data_ptr()

    def __call__(self, qkv: Tensor, cos: Tensor, sin: Tensor, paged: PagedFunction) -> Tensor:
        """See :data:`fused.layers.AttentionKernel`. All are in the dtype of the model."""
        query, key, value = self.form.split(qkv)
        for norm, heads in zip(self.wide_norms, (query, key), strict=False):
            norm.in_place(heads.flatten(1))  # a view
        self.rotate(qkv, cos, sin)
        return paged(self.form.call(query, key, value))

    def rotate(self, qkv: Tensor, cos: Tensor, sin: Tensor) -> None:
        """Norm and rotate query and key heads in place."""
        assert qkv.is_contiguous()
        if not cos.dtype == sin.dtype == qkv.dtype == self.dtype:
            raise Misfit("the angles of its rotary embedding are of another dtype")
        if cos.stride() != sin.stride() or cos.stride(1) != 1:
            cos, sin = cos.contiguous(), sin.contiguous()
        call = self.call_for(qkv)
        call.rotary_size, call.angle_stride = cos.shape[1], cos.stride(0) * cos.element_size()
        call.cos, call.sin = cos.data_ptr(), sin.data_ptr()
        _run_rows(self.kernel, call, qkv.shape[0], self._row_bytes)

    def call_for(self, qkv: Tensor) -> RotateCall:
        """The kernel's arguments for contiguous rows, but for their number and the angles."""
        call = RotateCall.from_buffer_copy(self._call)
        call.data, call.stride = qkv.data_ptr(), qkv.stride(0) * qkv.element_size()
        return call


def _run_rows(kernel: Kernel, call: NormCall | RotateCall, rows: int, row_bytes: int) -> None:
    """Run over so many rows, on as many threads as they are worth."""
    call.counter = 0
    call.rows = call.rows_per_item = rows
    threads = 1 + rows * row_bytes // _BYTES_PER_THREAD
    if threads > 1:
        threads = min(torch.get_num_threads(), threads, rows)
        # A few items per thread, so that one that is held up does not hold up the others.
        call.rows_per_item = -(-rows // (4 * threads))
    kernel.run(call, threads)
