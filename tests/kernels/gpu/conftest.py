"""The small model of these tests, and the CPU's runner of it."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from jitney.engine.assemble import load_runner
from jitney.execution.runner import TorchRunner

from tests.kernels.gpu.small_gpu import options, small_checkpoint


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_checkpoint(tmp_path_factory.mktemp("gpu_runner"))


@pytest.fixture(scope="module")
def plain(path: Path) -> Iterator[TorchRunner]:
    """The CPU's runner."""
    runner = load_runner(options(path, attention="reference", prepack=False, fuse=False))
    yield runner
    runner.close()
