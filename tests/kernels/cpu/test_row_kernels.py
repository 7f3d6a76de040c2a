"""The kernels of rows against plain torch, at sizes that are no multiple of a vector."""

import pytest
import torch

pytest.importorskip("numba")

from jitney.kernels.cpu.layer_kernels import CpuLayerKernels
from jitney.kernels.fused.forms import AttentionForm, HeadNorms, NormForm
from jitney.kernels.fused.rotary import NO_ANGLES
from jitney.kernels.fused.trial import relative_error

TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 4e-3}


@pytest.fixture(scope="module", params=sorted(TOLERANCE, key=str))
def dtype(request) -> torch.dtype:
    return request.param


@pytest.fixture(scope="module")
def kernels(dtype) -> CpuLayerKernels:
    return CpuLayerKernels(dtype, 8)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def normed(x: torch.Tensor, scale: torch.Tensor, epsilon: float) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon) * scale


@pytest.mark.parametrize("width", [1, 15, 16, 40, 768, 1000])
@pytest.mark.parametrize("rows", [1, 3, 700])
def test_norm(dtype, kernels, width: int, rows: int) -> None:
    """One thread for few rows, several for many."""
    scale = normal(width, seed=1)
    norm = kernels.norm(NormForm(scale, 1e-5))
    x = normal(1, rows, width).to(dtype)
    kept = x.clone()
    got = norm(x)
    assert got.shape == x.shape
    assert relative_error(got, normed(x.float(), scale, 1e-5)) < TOLERANCE[dtype]
    assert torch.equal(x, kept)


@pytest.mark.parametrize("width", [15, 40, 768])
@pytest.mark.parametrize("has_bias", [True, False])
def test_layer_norm(dtype, kernels, width: int, has_bias: bool) -> None:
    """Of rows whose mean is far larger than what is left of them."""
    scale = normal(width, seed=1)
    bias = normal(width, seed=2) if has_bias else None
    norm = kernels.norm(NormForm(scale, 1e-5, centred=True, bias=bias))
    x = (normal(1, 9, width) + 10.0).to(dtype)
    right = torch.nn.functional.layer_norm(x.float(), [width], scale, bias, 1e-5)
    assert relative_error(norm(x), right) < 10 * TOLERANCE[dtype]


@pytest.mark.parametrize("width", [40, 768])
def test_norm_plus_residual(dtype, kernels, width: int) -> None:
    scale = normal(width, seed=1)
    norm = kernels.norm(NormForm(scale, 1e-5))
    x = normal(9, width).to(dtype)
    other = normal(9, width, seed=3).to(dtype)
    right = normed(x.float(), scale, 1e-5) + other.float()
    assert relative_error(norm.plus(x, other), right) < TOLERANCE[dtype]


def test_norm_of_a_strided_input(dtype, kernels) -> None:
    norm = kernels.norm(NormForm(torch.ones(32), 1e-5))
    x = normal(4, 5, 64).to(dtype)[:, :, 16:48]
    assert torch.equal(norm(x), norm(x.contiguous()))


def test_norm_of_extreme_rows(dtype, kernels) -> None:
    """A row of zeros is zero, not NaN; a NaN stays in its row."""
    norm = kernels.norm(NormForm(torch.ones(24), 1e-5))
    x = normal(1, 3, 24).to(dtype)
    x[0, 0] = 0.0
    x[0, 1, 7] = float("nan")
    got = norm(x)
    assert (got[0, 0] == 0).all()
    assert got[0, 1, :16].isnan().all()
    assert got[0, 2].isfinite().all()


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x [T, heads, head]; cos and sin [T, rotary]."""
    rotary = cos.shape[-1]
    turned, rest = x[..., :rotary], x[..., rotary:]
    low, high = turned.chunk(2, -1)
    cross = torch.cat([-high, low], -1)
    return torch.cat([turned * cos[:, None] + cross * sin[:, None], rest], -1)


def between_halves(x: torch.Tensor, rotary: int) -> torch.Tensor:
    """The neighbours among the first ``rotary`` values moved to the two halves of these."""
    turned = x[..., :rotary]
    return torch.cat([turned[..., 0::2], turned[..., 1::2], x[..., rotary:]], -1)


@pytest.mark.parametrize(("head_size", "rotary"), [(64, 64), (128, 32), (20, 6)])
@pytest.mark.parametrize("angles_dtype", ["the data's", "float32"])
def test_rotation_of_neighbours(dtype, kernels, head_size, rotary, angles_dtype) -> None:
    """That of halves, of values in another order."""
    form = AttentionForm(0, 3, 2, head_size, 1.0, None, None, None, rotation="neighbours")
    x = normal(5, 7 * head_size).to(dtype)
    before = x.clone().view(5, 7, head_size)
    angles = normal(5, rotary // 2, seed=2)
    wanted = dtype if angles_dtype == "the data's" else torch.float32
    cos, sin = (each.to(wanted).repeat_interleave(2, 1) for each in (angles.cos(), angles.sin()))
    kernels.attention(form).norm_and_rotate(x, cos, sin)
    got = between_halves(x.view(5, 7, head_size)[:, :5], rotary)
    halves = [each.float()[:, 0::2].repeat(1, 2) for each in (cos, sin)]
    right = rotated(between_halves(before[:, :5].float(), rotary), *halves)
    assert relative_error(got, right) < TOLERANCE[dtype]
    assert torch.equal(x.view(5, 7, head_size)[:, 5:], before[:, 5:])


def test_float32_angles_are_not_rounded(kernels, dtype) -> None:
    """Angles that the data's type would round to 1 and 0."""
    form = AttentionForm(0, 1, 1, 32, 1.0, None, None, None)
    x = torch.cat([torch.ones(1, 16), torch.full((1, 80), 512.0)], 1).to(dtype)
    cos = torch.full((1, 32), 1.0)
    sin = torch.full((1, 32), 1.0 + 2.0**-9)
    kernels.attention(form).norm_and_rotate(x, cos, sin)
    assert (x[0, :16] == 1.0 - 512.0 - 1.0).all()


@pytest.mark.parametrize("norms", [True, False])
def test_heads_without_rotary_embedding(kernels, dtype, norms: bool) -> None:
    """Their angles are not read."""
    scale = normal(32, seed=3)
    forms = HeadNorms(NormForm(scale, 1e-5), NormForm(scale, 1e-5)) if norms else None
    form = AttentionForm(0, 2, 1, 32, 1.0, None, None, None, forms, rotation="none")
    x = normal(5, 4 * 32).to(dtype)
    before = x.clone().view(5, 4, 32)
    kernels.attention(form)(x, *NO_ANGLES, lambda call: call.query)
    right = before[:, :3].float()
    if norms:
        right = normed(right, scale, 1e-5)
    assert relative_error(x.view(5, 4, 32)[:, :3], right) < TOLERANCE[dtype]


@pytest.mark.parametrize(("head_size", "rotary"), [(64, 64), (128, 32), (24, 24), (20, 6)])
@pytest.mark.parametrize("tokens", [1, 5, 300])
@pytest.mark.parametrize("norms", ["none", "of a head", "of all heads"])
def test_rotation(dtype, kernels, head_size, rotary, tokens, norms) -> None:
    """Query and key heads turn, in place; value heads stay, to the bit."""
    query_heads, key_heads = 3, 2
    wide = norms == "of all heads"
    sizes = [heads * head_size if wide else head_size for heads in (query_heads, key_heads)]
    scales = [normal(size, seed=3 + i) for i, size in enumerate(sizes)]
    forms = None if norms == "none" else HeadNorms(*(NormForm(scale, 1e-5) for scale in scales))
    form = AttentionForm(0, query_heads, key_heads, head_size, 1.0, None, None, None, forms)
    rotate = kernels.attention(form).norm_and_rotate
    heads = query_heads + 2 * key_heads
    x = normal(tokens, heads * head_size).to(dtype)
    angles = normal(tokens, rotary // 2, seed=2).repeat(1, 2)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    before = x.clone().view(tokens, heads, head_size)
    rotate(x, cos, sin)
    got = x.view(tokens, heads, head_size)
    turning = before[:, : query_heads + key_heads].float()
    if forms is not None:
        parts = zip(turning.split([query_heads, key_heads], 1), scales, strict=True)
        turning = torch.cat(
            [
                normed(part.flatten(1) if wide else part, scale, 1e-5).view(part.shape)
                for part, scale in parts
            ],
            1,
        )
    right = rotated(turning, cos.float(), sin.float())
    assert relative_error(got[:, : query_heads + key_heads], right) < TOLERANCE[dtype]
    assert torch.equal(got[:, query_heads + key_heads :], before[:, query_heads + key_heads :])


def test_two_thread_counts_give_the_same_bits(dtype, kernels) -> None:
    norm = kernels.norm(NormForm(torch.ones(768), 1e-5))
    x = normal(1, 600, 768).to(dtype)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = norm(x)
        torch.set_num_threads(2)
        two = norm(x)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(one, two)
