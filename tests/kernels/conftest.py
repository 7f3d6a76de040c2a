"""What tests of kernels in the Triton language share."""

from typing import Any

import numpy as np
import pytest


@pytest.fixture
def equal_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter multiplies tiles by NumPy's BLAS, which on some processors computes a row by
    its place in the tile. A GPU's matrix units do not; nor does this sum."""
    interpreter = pytest.importorskip("triton.runtime.interpreter")

    def create_dot(self: Any, a: Any, b: Any, d: Any, *_: object) -> Any:
        product = np.einsum("ik,kj->ij", a.data, b.data, dtype=d.data.dtype)
        return interpreter.TensorHandle(product + d.data, d.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)
