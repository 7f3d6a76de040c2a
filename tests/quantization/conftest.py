"""What tests of quantized weights share."""

import pytest
from jitney.quantization import devices


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers are chosen as on a GPU, where our integer kernels do not run: torch, torchao, floats.
    They lie on the CPU all the same."""
    monkeypatch.setattr(devices, "has_integer_kernels", lambda device: False)
