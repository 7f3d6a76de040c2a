"""How weights reach the device: what transformers is asked for, and what is copied on the way."""

from pathlib import Path

import pytest
import torch
from jitney.execution import weights
from jitney.execution.checkpoint import check_checkpoint
from torch import nn
from transformers import AutoConfig

from tests.tiny_models import make_checkpoint


def test_weights_in_the_stored_dtype_are_views_of_the_file(tmp_path: Path) -> None:
    """So nothing is copied before a weight is sent to the device. If this fails, loading for a GPU
    makes a copy of the model on the CPU."""
    folder = make_checkpoint(
        tmp_path / "m", dtype=torch.bfloat16, hidden_size=512, intermediate_size=4096
    )
    checkpoint = check_checkpoint(folder)
    config = AutoConfig.from_pretrained(folder)
    module = weights.read_weights(checkpoint, config, torch.bfloat16)
    mapped = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        if line.endswith(str(folder / "model.safetensors")):
            begin, _, end = line.split()[0].partition("-")
            mapped.append(range(int(begin, 16), int(end, 16)))
    assert mapped
    for name, parameter in module.named_parameters():
        assert any(parameter.data_ptr() in part for part in mapped), name


def test_a_layer_that_takes_parts_of_others_counts_them() -> None:
    """torchao's tensors report the dtype they stand for; what they take is that of their parts."""
    quantization = pytest.importorskip("torchao.quantization")
    linear = nn.Linear(64, 32, bias=False)
    assert weights.stored_bytes(linear.weight) == 64 * 32 * 4
    quantization.quantize_(linear, quantization.Int8WeightOnlyConfig(set_inductor_config=False))
    assert weights.stored_bytes(linear.weight) == 32 * (64 + 4 + 1)


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"),
    ],
)
def test_memory_that_runs_out_is_no_fault_of_the_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    folder = make_checkpoint(tmp_path / "m")
    monkeypatch.setattr(weights, "_from_pretrained", fail)
    config = AutoConfig.from_pretrained(folder)
    with pytest.raises(MemoryError):
        weights.read_weights(check_checkpoint(folder), config, torch.float32)
