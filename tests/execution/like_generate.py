"""Tiny random checkpoints of any type, and their tokens beside those of transformers' own
``generate``."""

from pathlib import Path

import torch
import transformers
from jitney.engine.assemble import load_runner
from jitney.execution.checkpoint import check_checkpoint, resolve_model
from jitney.execution.interface import LoadedModel
from jitney.execution.read_model import LoadTools, judge, prove, read_module
from jitney.read_config import make_config
from jitney.sampling_params import SamplingParams

from tests.execution.drive import drive
from tests.execution.generate import eager, expected_outputs, make_prompts
from tests.tiny_models import TINY_SHAPE, make_model

_NEW_TOKENS = 24


def make_type(folder: Path, model_type: str, **fields: object) -> Path:
    """A checkpoint of this type. A field of None is left to the type."""
    given = {**TINY_SHAPE, **fields}
    stated = {name: value for name, value in given.items() if value is not None}
    config = transformers.CONFIG_MAPPING[model_type](**stated)
    make_model(config).save_pretrained(folder)
    return folder


def options_for(folder: Path, **more: object) -> dict[str, object]:
    """Options of a load, of one thread and a small cache."""
    small = {"threads": 1, "kv_cache_bytes": 4 << 20}
    return {"model": str(folder), "device": "cpu", "dtype": "float32", **small, **more}


def prove_paged(folder: Path, **options: object) -> LoadedModel:
    """Run the proof of a paged cache alone. Raises UnsupportedModelError where a load would go on
    to an opaque one."""
    config = make_config(options_for(folder, **options))
    tools = LoadTools(torch.device("cpu"))
    judged = judge(config, tools, check_checkpoint(resolve_model(config.model)))
    return prove(read_module(config, tools, judged))


def assert_like_generate(
    folder: Path, lengths: tuple[int, ...] = (5, 17, 33, 70), **options: object
) -> None:
    """All prompts in one batch give the tokens that ``generate`` gives for each alone."""
    prompts = make_prompts(*lengths)
    expected = expected_outputs(eager(folder), prompts, _NEW_TOKENS)
    runner = load_runner(make_config(options_for(folder, **options)))
    params = SamplingParams(temperature=0.0, max_tokens=_NEW_TOKENS, ignore_eos=True, seed=0)
    driven = drive(runner, [(prompt, params) for prompt in prompts], budget=64)
    runner.close()
    assert driven.outputs == expected
    assert len({token for tokens in expected.values() for token in tokens}) > 4
