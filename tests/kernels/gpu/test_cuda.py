"""Several architectures on a GPU, through its own kernels and with the attention in plain torch."""

from pathlib import Path

import pytest
import torch
import transformers
from jitney.config import make_config
from jitney.engine.assemble import load_runner
from jitney.sampling_params import SamplingParams

from tests.execution.drive import drive
from tests.tiny_models import VOCAB_SIZE, make_checkpoint

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "gpt_oss", "qwen3_moe"])
@pytest.mark.parametrize("attention", ["gpu", "reference"])
def test_parity_on_the_gpu(tmp_path: Path, architecture: str, attention: str) -> None:
    """Greedy in f32: a mixed batch on the GPU gives what ``generate`` gives there, alone."""
    path = make_checkpoint(tmp_path, architecture)
    generator = torch.Generator().manual_seed(5)
    prompts = [
        torch.randint(3, VOCAB_SIZE, (1, n), generator=generator, dtype=torch.long)
        for n in (5, 23, 40)
    ]
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path, attn_implementation="eager", dtype=torch.float32
    ).cuda()
    expected = [
        model.generate(
            prompt.cuda(),
            attention_mask=torch.ones_like(prompt).cuda(),
            max_new_tokens=32,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )[0, prompt.shape[1] :].tolist()
        for prompt in prompts
    ]
    runner = load_runner(
        make_config({
            "model": str(path), "device": "cuda", "dtype": "float32", "block_size": 4,
            "kv_cache_bytes": 4 << 20, "attention": attention,
        })
    )  # fmt: skip
    assert (runner.info.device, runner.info.attention) == ("cuda:0", attention)
    assert runner.info.overlap == (attention == "gpu")
    params = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True, seed=0)
    requests = [(prompt[0].tolist(), params) for prompt in prompts]
    driven = drive(runner, requests, budget=9, stagger=3, num_blocks=40)
    assert driven.outputs == {(i, 0): tokens for i, tokens in enumerate(expected)}
