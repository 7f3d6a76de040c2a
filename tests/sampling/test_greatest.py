"""The native search for the greatest logit finds what torch's finds, and what is no number."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from jitney.execution.sampler import Greatest, select_greatest, torch_greatest

pytest.importorskip("numba")

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
FOUND = {dtype: select_greatest(torch.device("cpu"), dtype) for dtype in DTYPES}
NEGATIVE_NAN = {  # what x86 makes of inf - inf: its sign is set
    torch.bfloat16: torch.tensor([-64], dtype=torch.int16).view(torch.bfloat16),
    torch.float16: torch.tensor([-512], dtype=torch.int16).view(torch.float16),
    torch.float32: torch.tensor([-(1 << 22)], dtype=torch.int32).view(torch.float32),
}


@pytest.fixture(scope="module", params=DTYPES, ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


@pytest.fixture(scope="module")
def greatest(dtype: torch.dtype) -> Greatest:
    assert FOUND[dtype] is not torch_greatest
    return FOUND[dtype]


def first_places(logits: torch.Tensor) -> list[int]:
    return [int((row == row.max()).nonzero()[0]) for row in logits]


@pytest.mark.parametrize("width", [1, 2, 31, 64, 1023, 1024, 1025, 32_000])
@pytest.mark.parametrize("shift", [0.0, -100.0], ids=["any sign", "all negative"])
def test_the_first_of_the_greatest(greatest, dtype, width: int, shift: float) -> None:
    logits = (torch.randn(37, width, generator=torch.Generator().manual_seed(width)) + shift).to(
        dtype
    )
    places, broken = greatest(logits)
    assert places == first_places(logits)  # 16 bits have many ties
    assert broken == []
    assert greatest(logits[5:6]) == (places[5:6], [])
    assert greatest(logits[::3])[0] == places[::3]


@settings(deadline=None, max_examples=50)
@given(
    rows=st.lists(
        st.lists(st.sampled_from([-math.inf, -2.5, -1.0, 0.0, 1.0, 3.0]), min_size=9, max_size=9),
        min_size=1,
        max_size=5,
    )
)
def test_few_values(rows: list[list[float]]) -> None:
    for dtype, greatest in FOUND.items():
        logits = torch.tensor(rows, dtype=dtype)
        places, broken = greatest(logits)
        assert places == first_places(logits)
        assert broken == [i for i, row in enumerate(rows) if max(row) == -math.inf]


def test_what_is_no_finite_number(greatest, dtype) -> None:
    logits = torch.randn(7, 3000).to(dtype)
    logits[1, 2999] = math.nan
    logits[2, 1500] = NEGATIVE_NAN[dtype]
    assert math.isnan(logits[2, 1500])
    logits[3, 0] = math.inf
    logits[4] = -math.inf
    logits[5, :2999] = -math.inf
    places, broken = greatest(logits)
    assert broken == torch_greatest(logits)[1] == [1, 2, 3, 4]
    assert places[1:4] == [2999, 1500, 0]
    assert places[5] == 2999


def test_other_types_and_devices_take_torchs() -> None:
    assert select_greatest(torch.device("cpu"), torch.float64) is torch_greatest
    assert select_greatest(torch.device("meta"), torch.float32) is torch_greatest
