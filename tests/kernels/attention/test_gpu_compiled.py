"""The GPU's attention kernels compile for chips that are not here, within their registers and
shared memory, and to the instructions they were written for."""

import pytest

pytest.importorskip("triton")
from tests.kernels.attention.compiled import Form, Use, uses

SHARED = {80: 163 << 10, 86: 99 << 10, 90: 227 << 10}
"""Bytes that one program may have."""


def check(capability: int, form: Form, kernels: list[Use], stack: int = 0) -> None:
    names = [use.kernel for use in kernels]
    assert names == ["write_kernel", "attention_kernel", "reduction_kernel"][: 2 + form.in_parts]
    for use in kernels:
        assert use.shared <= SHARED[capability], (form, use)
        assert use.stack <= stack, (form, use)
    attend = kernels[1]
    if not form.float8:
        assert attend.copies == attend.wide_copies > 0, (form, attend)
    if form.dtype != "fp32":
        assert attend.matrix > 0
    if capability == 90 and form.kind == "mixed" and form.dtype != "fp32":
        assert attend.warpgroup > 0


@pytest.mark.slow
def test_the_usual_kernels_for_compute_capability_9_0():
    """Decodes of Llama's shape: three programs of 72 KiB and at most 168 registers share a
    processor. Chunks: the matrix units' instructions for a warpgroup."""
    decodes, mixed = Form("decodes"), Form("mixed")
    (write, attend, reduce), other = uses(90, [decodes, mixed])
    check(90, decodes, [write, attend, reduce])
    check(90, mixed, other)
    assert 3 * (attend.shared + 1024) <= 228 << 10
    assert 3 * 128 * attend.registers <= 65536


FEW = [
    Form("decodes", size=64, block_size=64, in_parts=False),
    Form("mixed", size=256, transform=False),
    Form("mixed", dtype="fp32", size=128),
]
ALL = [
    *FEW,
    Form("decodes", size=256, block_size=64, in_parts=False),
    Form("mixed", size=80, transform=False),
    Form("decodes", window=100, softcap=30.0, sinks=True, dtype="fp16"),
    Form("mixed", window=100, softcap=30.0, sinks=True, dtype="fp16"),
    Form("decodes", heads=(28, 4)),
    *[Form(kind, batch_invariant=True, in_parts=False) for kind in ("decodes", "mixed")],
    Form("decodes", dtype="fp32", size=64),
    Form("decodes", float8=True, size=128),
    Form("mixed", float8=True, size=64),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("capability", "forms", "stack"), [(90, ALL, 0), (80, FEW, 128), (86, FEW, 64)]
)
def test_every_form(capability, forms, stack):
    """Before 9.0, products come by warps and a few values are spilled. 8.6 has less memory."""
    for form, kernels in zip(forms, uses(capability, forms), strict=True):
        check(capability, form, kernels, stack)
