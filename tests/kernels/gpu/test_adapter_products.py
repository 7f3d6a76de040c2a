"""What adapters add on a GPU: what plain torch adds, and bitwise the same for a token in every
batch."""

from collections.abc import Sequence

import pytest
import torch
from jitney.execution.low_rank import AdapterSpan, Factors, LowRank, Part, plain_products
from torch import Tensor

from tests.kernels.gpu.noise import TOLERANCE, noise

pytest.importorskip("triton")

from jitney.kernels.gpu import adapter_products
from jitney.kernels.gpu.adapter_products import GroupedProducts

INPUTS = 200
EVEN = [Part("q", 0, 160), Part("k", 160, 192), Part("v", 192, 224)]
ODD = [Part("gate", 0, 130), Part("up", 130, 147)]
ALONE = [Part("down", 0, 40)]
LAYERS = [EVEN, ODD, ALONE]
PRODUCTS = GroupedProducts(LAYERS)
PARTS = {part.path: part for parts in LAYERS for part in parts}


def make_adapter(dtype: torch.dtype, seed: int, *, inputs: int = INPUTS, **ranks: int) -> LowRank:
    """With a rank for each of some layers. What lies in memory behind its factors is no number."""
    factors = {}
    for n, (path, rank) in enumerate(ranks.items()):
        outputs = PARTS[path].last - PARTS[path].first
        a = noise(100 * seed + n, rank, inputs, dtype=dtype) / inputs**0.5
        b = noise(100 * seed + 50 + n, rank, outputs, dtype=dtype) / rank**0.5
        ends = [
            torch.cat((each, torch.full_like(each[:1].expand(64, -1), torch.nan)))
            for each in (a, b)
        ]
        factors[path] = Factors(*(each[:rank] for each in ends))
    return LowRank(str(seed), factors, PRODUCTS.pack(factors))


def mixed(dtype: torch.dtype) -> list[LowRank]:
    """Of different ranks, also from layer to layer, and on some layers alone."""
    return [
        make_adapter(dtype, 1, q=3, v=64),
        make_adapter(dtype, 2, q=8, k=16, v=8, gate=8, up=8, down=8),
        make_adapter(dtype, 3, q=64, k=1, gate=17, down=33),
        make_adapter(dtype, 4, v=16, up=16),
    ]


def spans_of(adapters: Sequence[LowRank], *ends: tuple[int | None, int]) -> list[AdapterSpan]:
    """Of tokens one after the other: each (index of the adapter or None, number of tokens)."""
    spans = []
    first = 0
    for index, count in ends:
        if index is not None:
            spans.append(AdapterSpan(first, first + count, adapters[index]))
        first += count
    return spans


def added(spans: list[AdapterSpan], parts: list[Part], x: Tensor, out: Tensor) -> Tensor:
    result = out.clone()
    PRODUCTS.begin(spans)(parts, x, result)
    return result


MIXED = ((None, 2), (0, 1), (2, 5), (1, 1), (None, 3), (0, 35), (3, 1), (2, 1), (1, 16), (None, 1))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("parts", LAYERS, ids=lambda parts: parts[0].path)
@pytest.mark.parametrize("ends", [MIXED, ((1, 1),), ((2, 40),), ((None, 3), (3, 2))], ids=len)
def test_as_plain_torch(ends, parts: list[Part], dtype: torch.dtype) -> None:
    """By what float64 gives; where a layer or a token has no adapter, nothing changes."""
    spans = spans_of(mixed(dtype), *ends)
    tokens = sum(count for _, count in ends)
    x = noise(7, tokens, INPUTS, dtype=dtype)
    out = noise(8, tokens, parts[-1].last, dtype=dtype)
    exact = [
        span._replace(adapter=LowRank("", {
            path: Factors(*(each.double() for each in pair))
            for path, pair in span.adapter.factors.items()
        }))
        for span in spans
    ]  # fmt: skip
    right = out.double()
    plain = out.clone()
    plain_products(exact)(parts, x.double(), right)
    plain_products(spans)(parts, x, plain)
    got = added(spans, parts, x, out)
    for each in (got, plain):
        assert float((each.double() - right).norm() / right.norm()) < TOLERANCE[dtype]
    same = right == out.double()
    assert torch.equal(got[same], out[same])


@pytest.mark.parametrize(
    "dtype",
    [
        pytest.param(dtype, marks=() if dtype == torch.bfloat16 else pytest.mark.slow)
        for dtype in TOLERANCE
    ],
)
@pytest.mark.parametrize("parts", [EVEN, ODD], ids=lambda parts: parts[0].path)
def test_a_token_does_not_depend_on_the_others(
    parts: list[Part], dtype: torch.dtype, equal_rows
) -> None:
    """Alone, in a prefill, in its decodes, among other adapters and in another order."""
    adapters = mixed(dtype)
    tokens = sum(count for _, count in MIXED)
    x = noise(7, tokens, INPUTS, dtype=dtype)
    out = noise(8, tokens, parts[-1].last, dtype=dtype)
    together = added(spans_of(adapters, *MIXED), parts, x, out)
    first = 0
    for index, count in MIXED:
        last = first + count
        if index is not None:
            whole = added(spans_of(adapters, (index, count)), parts, x[first:last], out[first:last])
            assert torch.equal(whole, together[first:last])
            for row in {first, last - 1, (first + last) // 2}:
                own = slice(row, row + 1)
                one = added(spans_of(adapters, (index, 1)), parts, x[own], out[own])
                assert torch.equal(one, together[own])
        first = last
    order = torch.randperm(tokens, generator=torch.Generator().manual_seed(3)).tolist()
    owners = [index for index, count in MIXED for _ in range(count)]
    spans = spans_of(adapters, *((owners[token], 1) for token in order))
    assert torch.equal(added(spans, parts, x[order], out[order]), together[order])


def test_no_launch_for_a_layer_that_no_adapter_changes(monkeypatch) -> None:
    adapter = make_adapter(torch.float32, 4, v=16, up=16)
    x = noise(7, 3, INPUTS)
    out = noise(8, 3, 40)
    monkeypatch.setattr(adapter_products, "shrink_kernel", None)
    assert torch.equal(added([AdapterSpan(0, 2, adapter)], ALONE, x, out), out)


def test_rows_may_lie_apart() -> None:
    """Those of x, and those that are added to."""
    adapter = make_adapter(torch.float32, 2, q=8, k=16)
    x = noise(7, 5, 2 * INPUTS)[:, ::2]
    out = noise(8, 5, 300)[:, :224]
    spans = [AdapterSpan(1, 4, adapter)]
    right = added(spans, EVEN, x.clone(), out.contiguous())
    PRODUCTS.begin(spans)(EVEN, x, out)
    assert torch.equal(out, right)


def test_factors_that_do_not_fit_are_not_packed() -> None:
    a = torch.zeros(8, INPUTS)
    b = torch.zeros(8, 160)
    for pair in (Factors(a, b[:, :80].contiguous()), Factors(a, b[:4]), Factors(a, b.T)):
        with pytest.raises(AssertionError):
            PRODUCTS.pack({"q": pair})
