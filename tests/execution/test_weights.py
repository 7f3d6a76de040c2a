"""How weights reach the device: what transformers is asked for, and what is copied on the way."""

from pathlib import Path

import pytest
import torch
from jitney.config import make_config
from jitney.errors import CheckpointError
from jitney.execution import weights
from jitney.execution.checkpoint import check_checkpoint
from jitney.execution.models import load_model
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from tests.tiny_models import make_checkpoint


@pytest.mark.parametrize("accelerate", [True, False])
def test_transformers_places_weights_itself_if_it_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, accelerate: bool
) -> None:
    """On a GPU, straight from the files; without accelerate it reads for the CPU."""
    checkpoint = check_checkpoint(make_checkpoint(tmp_path / "m"))
    asked: dict[str, object] = {}

    def load(*_: object, **options: object) -> None:
        asked.update(options)
        raise RuntimeError("enough")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", load)
    monkeypatch.setattr(weights, "is_accelerate_available", lambda: accelerate)
    config = AutoConfig.from_pretrained(checkpoint.folder)
    device = torch.device("cuda", 0)
    with pytest.raises(CheckpointError, match=r"cannot be loaded: RuntimeError: enough"):
        weights.read_weights(checkpoint, config, torch.float32, device)
    assert asked.get("device_map") == ({"": device} if accelerate else None)


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


def test_facts_of_an_unquantized_model(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "m", dtype=torch.bfloat16, tie_word_embeddings=True)
    model = load_model(make_config({"model": str(folder), "device": "cpu", "dtype": "bfloat16"}))
    parameters = list(model.module.parameters())
    assert model.num_parameters == sum(each.numel() for each in parameters)
    buffers = sum(each.numel() * each.element_size() for each in model.module.buffers())
    assert model.weight_bytes == 2 * model.num_parameters + buffers
