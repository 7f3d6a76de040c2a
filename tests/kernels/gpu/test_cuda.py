"""Several architectures on a GPU, through its own kernels and with the attention in plain torch."""

from pathlib import Path

import pytest
import torch
from jitney.engine.assemble import load_runner
from jitney.read_config import make_config
from jitney.sampling_params import SamplingParams

from tests.execution.drive import drive
from tests.execution.generate import eager, expected_outputs, make_prompts
from tests.tiny_models import make_checkpoint

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "gpt_oss", "qwen3_moe"])
@pytest.mark.parametrize("attention", ["gpu", "reference"])
def test_parity_on_the_gpu(tmp_path: Path, architecture: str, attention: str) -> None:
    """Greedy in f32: a mixed batch on the GPU gives what ``generate`` gives there, alone."""
    path = make_checkpoint(tmp_path, architecture)
    prompts = make_prompts(5, 23, 40)
    expected = expected_outputs(eager(path).cuda(), prompts, 32)
    runner = load_runner(
        make_config({
            "model": str(path), "device": "cuda", "dtype": "float32", "block_size": 4,
            "kv_cache_bytes": 4 << 20, "attention": attention,
        })
    )  # fmt: skip
    assert (runner.info.device, runner.info.attention) == ("cuda:0", attention)
    assert runner.info.overlap == (attention == "gpu")
    params = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True, seed=0)
    requests = [(prompt, params) for prompt in prompts]
    driven = drive(runner, requests, budget=9, stagger=3, num_blocks=40)
    assert driven.outputs == expected
