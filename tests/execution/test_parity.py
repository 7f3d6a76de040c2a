"""The paged engine gives the tokens of transformers' own ``generate`` with eager attention, in f32,
greedily, whatever the batch, the chunks, the prefix cache and preemption do."""

import dataclasses
from pathlib import Path

import pytest
import torch
from jitney.engine.assemble import load_runner
from jitney.execution.runner import TorchRunner
from jitney.read_config import make_config
from jitney.sampling_params import SamplingParams

from tests.execution.drive import drive
from tests.execution.generate import eager, generate, make_prompts
from tests.tiny_models import ARCHITECTURES, make_checkpoint

NUM_NEW = 64
LENGTHS = (5, 23, 40)
# Far above what f32 loses between two orders of summation, far below the spread of the logits (3).
MIN_GAP = 1e-3

# Attention -> tokens in a block: few, and the default, whose blocks the CPU kernel reads in place.
BLOCK_SIZES = {"reference": 4, "cpu": 16}
PARAMS = SamplingParams(temperature=0.0, max_tokens=NUM_NEW, ignore_eos=True, seed=0)


OFTEN = {"gemma2", "gpt2", "gpt_oss", "llama", "mixtral", "qwen3"}
"""What differs most. The others are served in a mixed batch by the slow tests."""
# Served in a mixed batch; in the other ways one is, unless slow tests run.
ONE_AT_LEAST = pytest.mark.parametrize(
    "case",
    [
        pytest.param(name, marks=() if name == "llama" else pytest.mark.slow)
        for name in sorted(ARCHITECTURES)
    ],
    indirect=True,
)


@dataclasses.dataclass
class Case:
    """One architecture: where it lies, and what ``generate`` makes of each prompt alone."""

    path: Path
    prompts: list[list[int]]
    expected: list[list[int]]


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=() if name in OFTEN else pytest.mark.slow)
        for name in sorted(ARCHITECTURES)
    ],
)
def case(request, tmp_path_factory) -> Case:
    """Prompts without near-ties anywhere on their greedy path."""
    torch.set_num_threads(1)  # as the runner will; tiny tensors gain nothing from more
    path = make_checkpoint(tmp_path_factory.mktemp(request.param), request.param)
    model = eager(path)
    prompts, expected = [], []
    for length in LENGTHS:
        for seed in range(8):
            (prompt,) = make_prompts(length, seed=1000 * length + seed)
            tokens, logits = generate(model, prompt, NUM_NEW)
            best = logits.topk(2).values
            if gap := (best[:, 0] - best[:, 1]).min() > MIN_GAP:
                break
        assert gap, "no prompt without a near-tie"
        prompts.append(prompt)
        expected.append(tokens)
    # Random weights can fall into a loop of a few tokens, which would prove little.
    assert len({token for tokens in expected for token in tokens}) > 20
    return Case(path, prompts, expected)


@pytest.fixture(scope="module", params=BLOCK_SIZES)
def runner(request, case: Case):
    """Plain torch, and all that the CPU has. One runner serves every scenario of a case: what one
    left in the cache must not matter."""
    options = {
        "model": str(case.path),
        "device": "cpu",
        "dtype": "float32",
        "attention": request.param,
        "prepack": request.param != "reference",
        "fuse": request.param != "reference",
        "block_size": BLOCK_SIZES[request.param],
        "threads": 1,
        "kv_cache_bytes": 4 << 20,
    }
    runner = load_runner(make_config(options))
    assert runner.info.attention == request.param
    yield runner
    runner.close()


@ONE_AT_LEAST
@pytest.mark.parametrize(("index", "budget"), [(2, 512), (2, 7), (1, 1)])
def test_alone(case: Case, runner: TorchRunner, index: int, budget: int) -> None:
    """In one chunk, in chunks of 7, and token by token."""
    driven = drive(runner, [(case.prompts[index], PARAMS)], budget=budget)
    assert driven.outputs == {(0, 0): case.expected[index]}
    assert driven.steps == -(-len(case.prompts[index]) // budget) + NUM_NEW - 1


def test_mixed_batch(case: Case, runner: TorchRunner) -> None:
    """Prompts of different lengths that join and leave, chunks beside decodes."""
    requests = [(prompt, PARAMS) for prompt in case.prompts]
    driven = drive(runner, requests, budget=9, stagger=5)
    assert driven.outputs == {(i, 0): tokens for i, tokens in enumerate(case.expected)}


@ONE_AT_LEAST
def test_prefix_hits(case: Case, runner: TorchRunner) -> None:
    """A prompt served again, and its continuation, start from cached blocks."""
    prompt, tokens = case.prompts[2], case.expected[2]
    size = runner.info.block_size
    grown = prompt + tokens[:21]
    short = SamplingParams(temperature=0.0, max_tokens=NUM_NEW - 21, ignore_eos=True, seed=0)
    driven = drive(
        runner, [(prompt, PARAMS), (prompt, PARAMS), (grown, short)], budget=64, stagger=70
    )
    assert driven.outputs == {(0, 0): tokens, (1, 0): tokens, (2, 0): tokens[21:]}
    assert driven.timings[1].timing.cached_prompt_tokens == (len(prompt) - 1) // size * size
    assert driven.timings[2].timing.cached_prompt_tokens == (len(grown) - 1) // size * size


@ONE_AT_LEAST
@pytest.mark.parametrize("prefix_caching", [True, False])
def test_preemption(case: Case, runner: TorchRunner, prefix_caching: bool) -> None:
    """A pool that cannot hold all three: sequences lose their blocks and are computed again."""
    requests = [(prompt, PARAMS) for prompt in case.prompts]
    needed = sum(-(-(length + NUM_NEW) // runner.info.block_size) for length in LENGTHS)
    driven = drive(
        runner,
        requests,
        budget=32,
        num_blocks=needed * 6 // 10,
        prefix_caching=prefix_caching,
        watermark=0.0,
    )
    assert driven.preemptions > 0
    assert driven.outputs == {(i, 0): tokens for i, tokens in enumerate(case.expected)}
