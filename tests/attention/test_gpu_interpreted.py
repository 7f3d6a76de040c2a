"""The GPU's attention kernels in the interpreter: against a softmax in float64."""

import os

import pytest
import torch

pytest.importorskip("triton")
from jitney.execution.attention.gpu import GpuAttention
from jitney.execution.attention.gpu_kernels import INTERPRETED

from tests.attention.test_attention import Case, Paged, naive, relative_error

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="kernels are compiled here")


def attention_of(case: Case, **options) -> GpuAttention:
    return GpuAttention(
        torch.device("cpu"), case.dtype, case.head_size, case.heads, case.kv_heads, **options
    )


def test_the_environment_is_not_changed():
    assert "TRITON_INTERPRET" not in os.environ


def test_chunks_and_decodes_in_one_batch():
    case = Case(heads=8, kv_heads=2)
    paged = Paged(case, [90, 40], attention_of(case))
    parts = [
        paged.step([(0, 0, 50), (1, 0, 1)]),
        paged.step([(1, 1, 40), (0, 50, 51)]),
        paged.step([(0, 51, 90)]),
    ]
    first = torch.cat([parts[0][0], parts[1][1], parts[2][0]])
    second = torch.cat([parts[0][1], parts[1][0]])
    assert relative_error(first, naive(case, *paged.inputs[0])) < 1e-6
    assert relative_error(second, naive(case, *paged.inputs[1])) < 1e-6
