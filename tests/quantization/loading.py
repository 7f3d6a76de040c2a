"""What the tests of quantized checkpoints do with each: write its configuration, load it, compare
it, generate with it.
"""

import json
from pathlib import Path

import torch
from jitney.engine.assemble import load_model, load_runner
from jitney.execution.interface import LoadedModel
from jitney.read_config import make_config
from jitney.sampling_params import SamplingParams
from torch import Tensor, nn

from tests.execution.drive import drive

IDS = torch.arange(3, 20)[None]
Tensors = dict[str, Tensor]


def write_config(
    folder: Path, weights_args: dict, *, stored_as: str = "float-quantized", **more: object
) -> None:
    """Give ``config.json`` a configuration of compressed-tensors with one group of layers."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    group = {"targets": ["Linear"], "weights": weights_args, **more}
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": stored_as,
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }
    path.write_text(json.dumps(config))


def load(folder: Path, **options: object) -> LoadedModel:
    """In bfloat16, unless ``options`` name a dtype: ``auto`` depends on the processor."""
    given = {"model": str(folder), "device": "cpu", "dtype": "bfloat16", **options}
    return load_model(make_config(given))


def eager_logits(module: nn.Module, ids: Tensor = IDS) -> Tensor:
    module.set_attn_implementation("eager")
    with torch.inference_mode():
        return module(ids, use_cache=False).logits[0].float()


def relative(got: Tensor, right: Tensor) -> float:
    return ((got - right).norm() / right.norm()).item()


def serve(folder: Path, **options: object) -> list[int]:
    """Ten tokens through the runner, with the dtype of :func:`load`."""
    given = {
        "model": str(folder),
        "device": "cpu",
        "dtype": "bfloat16",
        "kv_cache_bytes": 4 << 20,
        "block_size": 4,
        **options,
    }
    runner = load_runner(make_config(given))
    params = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True, seed=0)
    driven = drive(runner, [(IDS[0].tolist(), params)], budget=9, num_blocks=40)
    return driven.outputs[0, 0]


def linears(model: LoadedModel) -> list[nn.Module]:
    return [m for name, m in model.module.named_modules() if name.endswith("proj")]
