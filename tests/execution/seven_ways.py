"""The tokens of a model in every way in which its requests may run, beside those of
``generate``."""

from pathlib import Path

from jitney.engine.assemble import load_runner
from jitney.read_config import make_config
from jitney.sampling_params import SamplingParams

from tests.execution.drive import drive
from tests.execution.generate import make_prompts
from tests.execution.like_generate import options_for

NEW_TOKENS = 24
LENGTHS = (5, 17, 33, 70)


def greedy(n: int = 1) -> SamplingParams:
    """NEW_TOKENS greedy tokens."""
    return SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True, seed=0, n=n)


def assert_in_all_ways(
    folder: Path, expected: dict[tuple[int, int], list[int]], **options: object
) -> None:
    """The prompts of LENGTHS give the ``expected`` tokens in one batch, in chunks, with preemption,
    with drafts, with hits in the prefix cache, and when a sequence forks."""
    runner = load_runner(make_config(options_for(folder, **options)))
    prompts = make_prompts(*LENGTHS)
    requests = [(prompt, greedy()) for prompt in prompts]
    assert drive(runner, requests, budget=256).outputs == expected, "batch"
    assert drive(runner, requests, budget=16).outputs == expected, "chunks"
    tight = drive(runner, requests, budget=64, num_blocks=7)
    assert tight.preemptions > 0
    assert tight.outputs == expected, "preemption"
    drafts = {"speculation": {"drafter": "ngram", "max_drafts": 3}}
    assert drive(runner, requests, budget=64, **drafts).outputs == expected, "drafts"
    twice = drive(runner, requests + requests, budget=64, stagger=8)
    assert twice.hit_tokens > 0
    again = {(key % len(prompts), index): ids for (key, index), ids in twice.outputs.items()}
    assert again == expected, "prefix hits"
    forked = drive(runner, [(prompt, greedy(n=2)) for prompt in prompts], budget=64)
    assert forked.outputs == {
        (key, index): ids for (key, _), ids in expected.items() for index in range(2)
    }, "forks"
    runner.close()
