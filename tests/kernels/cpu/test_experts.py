"""Experts by our own kernels, against plain torch."""

import pytest
import torch
from jitney.kernels.fused.forms import Misfit, RouterForm
from jitney.kernels.fused.mixture import scores_of
from jitney.kernels.fused.trial import relative_error
from torch import Tensor
from torch.nn import functional

pytest.importorskip("numba")

from jitney.kernels.cpu.experts import FusedExperts
from jitney.kernels.cpu.layer_kernels import CpuLayerKernels

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 6e-3}
HIDDEN = 64
INNER = 96


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(params=sorted(TOLERANCE, key=str))
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


class Weights:
    """Of some experts."""

    def __init__(self, experts: int, dtype: torch.dtype) -> None:
        self.gate_up = (normal(experts, 2 * INNER, HIDDEN, seed=1) / 8).to(dtype)
        self.down = (normal(experts, HIDDEN, INNER, seed=2) / 10).to(dtype)

    def fused(self) -> FusedExperts:
        kernels = CpuLayerKernels(self.down.dtype, 8)
        return kernels.experts(self.gate_up, self.down, "silu")

    def right(self, x: Tensor, chosen: Tensor, scores: Tensor) -> Tensor:
        """By plain torch in float32, one pair after the other."""
        out = torch.zeros(x.shape)
        for t, experts in enumerate(chosen.tolist()):
            for j, expert in enumerate(experts):
                gate, up = (self.gate_up[expert].float() @ x[t].float()).chunk(2)
                inner = (functional.silu(gate) * up).to(x.dtype).float()
                out[t] += scores[t, j] * (self.down[expert].float() @ inner)
        return out


@pytest.mark.parametrize(("experts", "chosen"), [(4, 1), (60, 8)])
@pytest.mark.parametrize("tokens", [1, 5, 150])
@pytest.mark.parametrize("over_all", [True, False])
def test_the_sum_of_the_largest(
    dtype: torch.dtype, experts: int, chosen: int, tokens: int, over_all: bool
) -> None:
    weights = Weights(experts, dtype)
    x = normal(tokens, HIDDEN, seed=3).to(dtype)
    numbers = normal(tokens, experts, seed=4).to(dtype)
    # Of equal numbers the first: in 16 bits there are some.
    largest = numbers.float().argsort(descending=True, stable=True)[:, :chosen]
    scores = scores_of(numbers.float(), largest, over_all=over_all)
    right = weights.right(x, largest, scores)
    fused = weights.fused()
    got = fused.route(x, numbers, RouterForm(chosen, over_all=over_all))
    assert relative_error(got, right) < TOLERANCE[dtype]
    assert relative_error(fused(x, largest, scores), right) < TOLERANCE[dtype]


def test_many_tokens_of_one_expert(dtype: torch.dtype) -> None:
    """More rows than an item of a product has; the other experts have none."""
    weights = Weights(4, dtype)
    x = normal(300, HIDDEN, seed=3).to(dtype)
    chosen = torch.full((300, 1), 2)
    scores = torch.ones(300, 1)
    assert (
        relative_error(weights.fused()(x, chosen, scores), weights.right(x, chosen, scores))
        < (TOLERANCE[dtype])
    )


def test_a_token_is_the_same_in_every_batch(dtype: torch.dtype) -> None:
    fused = Weights(8, dtype).fused()
    x = normal(40, HIDDEN, seed=3).to(dtype)
    numbers = normal(40, 8, seed=4).to(dtype)
    form = RouterForm(2, over_all=False)
    together = fused.route(x, numbers, form)
    for t in (0, 17, 39):
        assert torch.equal(fused.route(x[t : t + 1], numbers[t : t + 1], form)[0], together[t])


def test_of_equal_numbers_the_first_are_chosen(dtype: torch.dtype) -> None:
    weights = Weights(8, dtype)
    x = normal(1, HIDDEN, seed=3).to(dtype)
    numbers = torch.tensor([[0.0, 1.0, 0.0, 2.0, 1.0, 1.0, -1.0, 1.0]]).to(dtype)
    chosen = torch.tensor([[3, 1, 4]])
    right = weights.right(x, chosen, scores_of(numbers.float(), chosen, over_all=False))
    got = weights.fused().route(x, numbers, RouterForm(3, over_all=False))
    assert relative_error(got, right) < TOLERANCE[dtype]


def test_numbers_that_are_none_stay_in_their_token(dtype: torch.dtype) -> None:
    fused = Weights(8, dtype).fused()
    x = normal(2, HIDDEN, seed=3).to(dtype)
    numbers = normal(2, 8, seed=4).to(dtype)
    form = RouterForm(2, over_all=False)
    right = fused.route(x, numbers, form)[1]
    numbers[0] = float("nan")
    got = fused.route(x, numbers, form)
    assert got[0].isnan().all()
    assert torch.equal(got[1], right)


def test_sizes_without_a_product_are_refused(dtype: torch.dtype) -> None:
    gate_up = torch.zeros(4, 40, HIDDEN, dtype=dtype)
    with pytest.raises(Misfit, match="no product of ours"):
        CpuLayerKernels(dtype, 8).experts(gate_up, torch.zeros(4, HIDDEN, 20, dtype=dtype), "silu")
