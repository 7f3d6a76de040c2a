"""The argmax gives what torch's gives, and says which rows are not finite."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from jitney.execution.sampler import argmax

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
NEGATIVE_NAN = {  # what x86 makes of inf - inf: its sign is set
    torch.bfloat16: torch.tensor([-64], dtype=torch.int16).view(torch.bfloat16),
    torch.float16: torch.tensor([-512], dtype=torch.int16).view(torch.float16),
    torch.float32: torch.tensor([-(1 << 22)], dtype=torch.int32).view(torch.float32),
    torch.float64: math.nan,
}


@pytest.fixture(scope="module", params=DTYPES, ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


def first_indices(logits: torch.Tensor) -> list[int]:
    return [int((row == row.max()).nonzero()[0]) for row in logits]


@pytest.mark.parametrize("width", [1, 2, 31, 64, 1023, 1024, 1025, 32_000])
@pytest.mark.parametrize("shift", [0.0, -100.0], ids=["any sign", "all negative"])
def test_the_first_of_equals(dtype, width: int, shift: float) -> None:
    logits = (torch.randn(37, width, generator=torch.Generator().manual_seed(width)) + shift).to(
        dtype
    )
    indices, finite = argmax(logits)
    assert indices.tolist() == first_indices(logits)  # 16 bits have many ties
    assert finite.all()
    assert argmax(logits[5:6])[0] == indices[5]
    assert torch.equal(argmax(logits[::3])[0], indices[::3])


@settings(max_examples=50)
@given(
    rows=st.lists(
        st.lists(st.sampled_from([-math.inf, -2.5, -1.0, 0.0, 1.0, 3.0]), min_size=9, max_size=9),
        min_size=1,
        max_size=5,
    )
)
def test_few_values(rows: list[list[float]]) -> None:
    for dtype in DTYPES:
        logits = torch.tensor(rows, dtype=dtype)
        indices, finite = argmax(logits)
        assert indices.tolist() == first_indices(logits)
        assert finite.tolist() == [max(row) > -math.inf for row in rows]


@pytest.mark.parametrize("negative", [True, False])
def test_what_is_no_finite_number(dtype, negative: bool) -> None:
    logits = torch.randn(7, 3000).to(dtype)
    logits[1, 2999] = math.nan
    logits[2, 1500] = NEGATIVE_NAN[dtype] if negative else math.nan
    assert math.isnan(logits[2, 1500])
    logits[3, 0] = math.inf
    logits[4] = -math.inf
    logits[5, :2999] = -math.inf
    indices, finite = argmax(logits)
    assert finite.tolist() == [True, False, False, False, False, True, True]
    assert torch.equal(finite, torch.isfinite(logits.max(dim=-1).values))
    assert indices[1:4].tolist() == [2999, 1500, 0]
    assert indices[5] == 2999
