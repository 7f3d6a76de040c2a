# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc"
# The compiler of the Triton language infers the types of what it compiles here.
"""The kernel in the Triton language that joins what several programs of ``gpu_kernels`` computed of
one row's context. Launched by ``gpu.GpuAttention`` alone."""

import triton
import triton.language as tl

from jitney.execution.attention.gpu_kernels import LOG2_E, finish, merge, part_span


@triton.jit(
    do_not_specialize=["num_parts", "window"],
    do_not_specialize_on_alignment=["part_tops", "part_totals"],  # it changes with the step
)
def reduction_kernel(
    out, part_results, part_tops, part_totals, value_scale, sinks, context_len, query_start,
    window, num_parts,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_SIZE: tl.constexpr, HEAD_TILE: tl.constexpr,
    SEGMENT: tl.constexpr, MOST_PARTS: tl.constexpr, BLOCK_N: tl.constexpr, MIN_PART: tl.constexpr,
):  # fmt: skip
    """Programs (rows, heads): join the parts of a row that has more than one."""
    row, query_head = tl.program_id(0), tl.program_id(1)
    token = tl.load(query_start + row)
    length = tl.load(query_start + row + 1) - token
    context = tl.load(context_len + row)
    low = context * 0
    if window is not None:
        low = tl.maximum(context - window, 0)
    _begin, _size, parts = part_span(context, low, num_parts, MIN_PART, SEGMENT, BLOCK_N)
    if (length == 1) & (parts > 1):
        element = tl.arange(0, HEAD_TILE)
        at = (row.to(tl.int64) * (KV_HEADS * GROUP) + query_head) * num_parts
        if SEGMENT:  # in the order of the context, as one program would
            top = tl.full([1], float("-inf"), tl.float32)
            total = tl.zeros([1], tl.float32)
            result = tl.zeros([1, HEAD_TILE], tl.float32)
            one = tl.arange(0, 1)
            for part in tl.range(0, parts):
                place = at + part + one
                part_result = tl.load(
                    part_results + place[:, None] * HEAD_SIZE + element[None, :],
                    (element < HEAD_SIZE)[None, :],
                    other=0.0,
                )
                top, total, result = merge(
                    top, total, result,
                    tl.load(part_tops + place), tl.load(part_totals + place), part_result,
                )  # fmt: skip
        else:
            part = tl.arange(0, MOST_PARTS)
            real = part < parts
            tops = tl.load(part_tops + at + part, real, other=float("-inf"))
            top = tl.max(tops, 0)
            weight = tl.exp2(tops - top)
            total = tl.sum(weight * tl.load(part_totals + at + part, real, other=0.0), 0)
            result = tl.load(
                part_results + (at + part)[:, None] * HEAD_SIZE + element[None, :],
                real[:, None] & (element < HEAD_SIZE)[None, :],
                other=0.0,
            )
            result = tl.sum(result * weight[:, None], 0)[None, :]
            top, total = top + tl.zeros([1], tl.float32), total + tl.zeros([1], tl.float32)
        factor, sink = 1.0, None
        if value_scale is not None:
            factor = tl.load(value_scale + query_head // GROUP)
        if sinks is not None:
            sink = (tl.load(sinks + query_head) * LOG2_E) + tl.zeros([1], tl.float32)
        result = finish(top, total, result, sink, factor)
        start = out + (token.to(tl.int64) * (KV_HEADS * GROUP) + query_head) * HEAD_SIZE
        place = start + element[None, :]
        tl.store(place, result.to(out.dtype.element_ty), (element < HEAD_SIZE)[None, :])
