# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc"
# The compiler of the Triton language infers the types of what it compiles here.
"""Kernels of what lies between two matrix products: residual sums and norms, and gated activations.

One program per row for the former, so that a row's result does not depend on what rows there are
beside it; sums are float32, in an order that the width alone decides. Called by ``norm``.
"""

import triton
import triton.language as tl

SILU = tl.constexpr(0)
GELU = tl.constexpr(1)
GELU_TANH = tl.constexpr(2)
RELU = tl.constexpr(3)


@triton.jit
def _root_mean_square(x, width, epsilon):
    """1 / sqrt(mean(x²) + epsilon) of a row whose padding is 0."""
    return tl.rsqrt(tl.sum(x * x, 0) / width + epsilon)


@triton.jit(do_not_specialize_on_alignment=["wanted"])  # it may be a part of a step's
def add_norm_kernel(
    out,  # [rows, WIDTH], rows out_stride apart: the norm of the sum; not written without NORM
    sums,  # [rows, WIDTH]: branch + residual; not written without ADD
    branch,  # [T, WIDTH], rows branch_stride apart
    residual,  # [T, WIDTH], rows residual_stride apart; not read without ADD
    wanted,  # int64 [rows]: which of the T, with GATHER
    branch_scale,  # float32 [WIDTH]: the branch is normed before it is added, with NORM_BRANCH
    scale,  # float32 [WIDTH]
    out_stride,
    branch_stride,
    residual_stride,
    branch_epsilon,
    epsilon,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    GATHER: tl.constexpr,
    ADD: tl.constexpr,
    NORM_BRANCH: tl.constexpr,
    NORM: tl.constexpr,
):
    """A row that fits into the registers of one program: read once, before anything is written."""
    row = tl.program_id(0).to(tl.int64)
    source = tl.load(wanted + row) if GATHER else row
    columns = tl.arange(0, BLOCK)
    inside = columns < WIDTH
    x = tl.load(branch + source * branch_stride + columns, mask=inside, other=0.0).to(tl.float32)
    if NORM_BRANCH:
        factor = _root_mean_square(x, WIDTH, branch_epsilon)
        x = x * factor * tl.load(branch_scale + columns, mask=inside, other=0.0)
    if ADD:
        place = residual + source * residual_stride + columns
        x += tl.load(place, mask=inside, other=0.0).to(tl.float32)
        rounded = x.to(sums.dtype.element_ty)
        tl.store(sums + row * WIDTH + columns, rounded, mask=inside)
        x = rounded.to(tl.float32)
    if NORM:
        y = x * _root_mean_square(x, WIDTH, epsilon)
        y *= tl.load(scale + columns, mask=inside, other=0.0)
        tl.store(out + row * out_stride + columns, y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _square_sum(x, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Sum of the squares of the row at ``x``."""
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, WIDTH, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        part = tl.load(x + columns, mask=columns < WIDTH, other=0.0).to(tl.float32)
        total += part * part
    return tl.sum(total, 0)


@triton.jit(do_not_specialize_on_alignment=["wanted"])  # it may be a part of a step's
def wide_add_norm_kernel(
    out,
    sums,
    branch,
    residual,
    wanted,
    branch_scale,
    scale,
    out_stride,
    branch_stride,
    residual_stride,
    branch_epsilon,
    epsilon,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    GATHER: tl.constexpr,
    ADD: tl.constexpr,
    NORM_BRANCH: tl.constexpr,
    NORM: tl.constexpr,
):
    """The same for a row of any width, read again for each pass over it, from the cache as a rule.

    The sum of the last pass is that of the rounded values, which the first has written.
    """
    row = tl.program_id(0).to(tl.int64)
    source = tl.load(wanted + row) if GATHER else row
    x = branch + source * branch_stride
    before = 1.0
    if NORM_BRANCH:
        before = tl.rsqrt(_square_sum(x, WIDTH, BLOCK) / WIDTH + branch_epsilon)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, WIDTH, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < WIDTH
        part = tl.load(x + columns, mask=inside, other=0.0).to(tl.float32)
        if NORM_BRANCH:
            part = part * before * tl.load(branch_scale + columns, mask=inside, other=0.0)
        if ADD:
            place = residual + source * residual_stride + columns
            part += tl.load(place, mask=inside, other=0.0).to(tl.float32)
            rounded = part.to(sums.dtype.element_ty)
            tl.store(sums + row * WIDTH + columns, rounded, mask=inside)
            part = rounded.to(tl.float32)
        total += part * part
    if NORM:
        tl.debug_barrier()  # what is read below, another thread may have written above
        factor = tl.rsqrt(tl.sum(total, 0) / WIDTH + epsilon)
        for start in range(0, WIDTH, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            inside = columns < WIDTH
            if ADD:
                part = tl.load(sums + row * WIDTH + columns, mask=inside, other=0.0)
            else:
                part = tl.load(x + columns, mask=inside, other=0.0)
            y = part.to(tl.float32) * factor * tl.load(scale + columns, mask=inside, other=0.0)
            tl.store(out + row * out_stride + columns, y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def layer_norm_kernel(
    out,  # [rows, WIDTH]
    x,  # [rows, WIDTH], rows stride apart
    weight,  # float32 [WIDTH]
    bias,  # float32 [WIDTH]
    stride,
    epsilon,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """(x - mean) / sqrt(variance + epsilon) * weight + bias of one row."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < WIDTH
    values = tl.load(x + row * stride + columns, mask=inside, other=0.0).to(tl.float32)
    centred = tl.where(inside, values - tl.sum(values, 0) / WIDTH, 0.0)
    y = centred * _root_mean_square(centred, WIDTH, epsilon)
    y = y * tl.load(weight + columns, mask=inside, other=0.0)
    y += tl.load(bias + columns, mask=inside, other=0.0)
    tl.store(out + row * WIDTH + columns, y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _activate(x, ACTIVATION: tl.constexpr):
    if ACTIVATION == SILU:
        y = x / (1.0 + tl.exp(-x))
    elif ACTIVATION == GELU:
        y = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif ACTIVATION == GELU_TANH:
        # 0.5 (1 + tanh z) is the logistic function of 2 z.
        y = x / (1.0 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))
    else:
        y = tl.maximum(x, 0.0)
    return y


@triton.jit
def gate_kernel(
    out,  # [rows, WIDTH]
    x,  # [rows, 2 WIDTH]: the gate, then what it is multiplied with; rows stride apart
    stride,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ACTIVATION: tl.constexpr,
):
    """activation(gate) * up of one block of one row."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < WIDTH
    gate = tl.load(x + row * stride + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + row * stride + WIDTH + columns, mask=inside, other=0.0).to(tl.float32)
    y = _activate(gate, ACTIVATION) * up
    tl.store(out + row * WIDTH + columns, y.to(out.dtype.element_ty), mask=inside)
