"""While a load checks a model, each quantized weight becomes floats once, not once for each run."""

from pathlib import Path

import pytest
import torch
from jitney.engine import assemble
from jitney.execution import read_model
from jitney.execution.load import load_runner
from jitney.execution.quantized import QuantizedLinear, hold_floats
from jitney.quantization.eight_bits import Int8Linear
from jitney.quantization.four_bits import Int4Linear
from jitney.read_config import make_config
from torch import Tensor

from tests.tiny_models import make_checkpoint


def options(folder: Path, kind: str) -> dict[str, object]:
    given = {"model": str(folder), "device": "cpu", "dtype": "bfloat16", "quantization": kind}
    return {**given, "kv_cache_bytes": 4 << 20, "fuse": False, "prepack": False}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path / "m", dtype=torch.bfloat16)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[QuantizedLinear]:
    """The layers of 4 bits whose weights were made floats, one entry for each time."""
    seen: list[QuantizedLinear] = []
    dequantized = Int4Linear.dequantized

    def note(self: Int4Linear) -> Tensor:
        seen.append(self)
        return dequantized(self)

    monkeypatch.setattr(Int4Linear, "dequantized", note)
    return seen


def test_once_in_a_load(folder: Path, made: list[QuantizedLinear]) -> None:
    config = make_config(options(folder, "int4"))
    model = assemble.load_model(config)
    assert len(made) == len(set(made)) == 14
    for layer in model.module.modules():
        if isinstance(layer, QuantizedLinear):
            assert layer._held_floats is None, "freed once the checks are over"


def test_nothing_is_held_beyond_the_budget(
    folder: Path, made: list[QuantizedLinear], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read_model, "_MOST_FLOATS", 0)
    assemble.load_model(make_config(options(folder, "int4")))
    assert len(made) > 5 * len(set(made))


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_nothing_is_held_in_service(folder: Path, kind: str) -> None:
    runner = load_runner(make_config(options(folder, kind)), None, assemble.quantizer())
    layers = [each for each in runner._model.module.modules() if isinstance(each, QuantizedLinear)]
    assert len(layers) == 15
    assert all(each._held_floats is None and each.float_budget is None for each in layers)


@pytest.mark.parametrize("cls", [Int8Linear, Int4Linear])
def test_results_are_the_same(cls: type[Int8Linear] | type[Int4Linear]) -> None:
    generator = torch.Generator().manual_seed(0)
    layer = cls.quantized_from(torch.randn(48, 64, generator=generator), None)
    x = torch.randn(3, 64, generator=generator)
    plain = layer(x)
    hold_floats(layer, 1 << 20)
    assert torch.equal(layer(x), plain)
    assert layer._held_floats is not None
    assert torch.equal(layer(x), plain)
