"""Checkpoints with towers: their text half is loaded alone, and gives the tokens of the whole."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from jitney.engine.assemble import load_runner
from jitney.errors import UnsupportedModelError
from jitney.read_config import make_config
from jitney.sampling_params import SamplingParams

from benchmarks.architectures import tiny
from tests.execution.drive import drive
from tests.execution.generate import expected_outputs, make_prompts
from tests.execution.like_generate import options_for

_COUNT = 16

# Their tensors are named in the ways of released checkpoints: ``language_model.model`` and
# ``model.language_model``. Qwen's text half has no language model of its own in transformers.
_WITH_TOWERS = ("gemma3", "mistral3", "llava", "qwen2_5_vl", "qwen3_vl")


def make_whole(folder: Path, model_type: str) -> transformers.PreTrainedModel:
    """A tiny checkpoint with its towers; returns the model."""
    config = tiny.make_config(model_type)
    torch.manual_seed(0)
    model = transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    tiny.spread(model, torch.Generator().manual_seed(0))
    model.save_pretrained(folder)
    return transformers.AutoModelForImageTextToText.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32
    ).eval()


@pytest.mark.parametrize("model_type", _WITH_TOWERS)
def test_the_text_half_gives_the_tokens_of_the_whole(tmp_path: Path, model_type: str) -> None:
    whole = make_whole(tmp_path, model_type)
    prompts = make_prompts(5, 17, 33)
    expected = expected_outputs(whole, prompts, _COUNT)
    runner = load_runner(make_config(options_for(tmp_path)))
    params = SamplingParams(temperature=0.0, max_tokens=_COUNT, ignore_eos=True, seed=0)
    driven = drive(runner, [(prompt, params) for prompt in prompts], budget=64)
    # Towers are not in memory.
    of_whole = sum(parameter.numel() for parameter in whole.parameters())
    num_parameters = runner.info.num_parameters
    runner.close()
    assert driven.outputs == expected
    assert len({token for tokens in expected.values() for token in tokens}) > 4
    assert num_parameters < of_whole


def test_the_end_of_a_sequence_is_that_of_either_part(tmp_path: Path) -> None:
    make_whole(tmp_path, "gemma3")
    (tmp_path / "generation_config.json").unlink(missing_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    config.pop("eos_token_id", None)
    config["text_config"]["eos_token_id"] = [7, 8]
    (tmp_path / "config.json").write_text(json.dumps(config))
    runner = load_runner(make_config(options_for(tmp_path)))
    eos_ids = runner.info.eos_ids
    runner.close()
    assert eos_ids == {7, 8}


def test_quantized_weights_beside_towers_are_refused_by_name(tmp_path: Path) -> None:
    make_whole(tmp_path, "llava")
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4, "group_size": 32}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModelError, match="its weights are quantized") as caught:
        load_runner(make_config(options_for(tmp_path)))
    assert "llava" in str(caught.value)
