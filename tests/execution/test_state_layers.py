"""Models with state layers give the tokens of transformers' own ``generate``, whatever batch,
chunks, preemption and forks do."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from jitney.engine.assemble import load_runner, weigh
from jitney.errors import UnsupportedModelError
from jitney.execution.runner import TorchRunner
from jitney.read_config import make_config
from jitney.sampling_params import SamplingParams

from tests.execution.drive import drive, prompt_logprobs_of
from tests.execution.generate import eager, expected_outputs, make_prompts
from tests.execution.like_generate import options_for
from tests.execution.state_types import STATE_TYPES, state_type
from tests.tiny_models import make_checkpoint

NUM_NEW = 24
LENGTHS = (5, 17, 33, 70)
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_NEW, ignore_eos=True, seed=0)
FORKING = SamplingParams(temperature=0.0, max_tokens=NUM_NEW, ignore_eos=True, seed=0, n=3)

# One of each: attention beside a delta rule, states in every layer and one token at a time, both in
# one layer, shared attention, a cache of its own class, convolutions.
OFTEN = {"qwen3_5_text", "mamba", "falcon_h1", "zamba2", "minimax", "lfm2"}
TOKEN_BY_TOKEN = {"mamba", "falcon_mamba", "jamba", "zamba"}
"""After a state these go on by single tokens: Mamba 1."""


@dataclass
class Case:
    """One type: its runner, and what ``generate`` makes of each prompt alone."""

    folder: Path
    runner: TorchRunner
    prompts: list[list[int]]
    expected: dict[tuple[int, int], list[int]]


@pytest.fixture(scope="module", params=sorted(OFTEN))
def case(request, tmp_path_factory):
    with make_case(tmp_path_factory.mktemp(request.param), request.param) as made:
        yield made


@pytest.fixture(scope="module")
def trunk(tmp_path_factory):
    """A type that is taken where one is enough."""
    with make_case(tmp_path_factory.mktemp("trunk"), "lfm2") as made:
        yield made


@contextmanager
def make_case(folder: Path, model_type: str) -> Iterator[Case]:
    torch.set_num_threads(1)  # as the runner will
    state_type(folder, model_type)
    prompts = make_prompts(*LENGTHS)
    expected = expected_outputs(eager(folder), prompts, NUM_NEW)
    # Random weights can fall into a loop of a few tokens, which would prove little.
    assert len({token for tokens in expected.values() for token in tokens}) > 20
    runner = load(folder)
    # A fault that the proof at load notices leads to an opaque cache, which gives the same tokens.
    assert "state" in runner.info.cache
    assert bool(runner.info.num_snapshots) == (model_type not in TOKEN_BY_TOKEN)
    yield Case(folder, runner, prompts, expected)
    runner.close()


def load(folder: Path, **options: object) -> TorchRunner:
    return load_runner(
        make_config(options_for(folder, max_model_len=256, max_num_seqs=8, **options))
    )


WAYS = {
    "in one batch": {"budget": 64},
    "in chunks": {"budget": 16},
    # The last of them joins when others decode, and each chunk shares a step with decodes.
    "one after the other": {"budget": 24, "stagger": 4},
    "preempted": {"budget": 64, "num_blocks": 12},
    "in turns": {"budget": 64, "num_slots": 2},
}


@pytest.mark.parametrize("way", WAYS)
def test_tokens_are_those_of_generate(case: Case, way: str) -> None:
    assert_tokens(case, way)


def test_forks_go_on_from_a_copy_of_the_state(case: Case) -> None:
    assert_forks(case)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", sorted(set(STATE_TYPES) - OFTEN))
def test_other_types_give_the_tokens_of_generate(tmp_path: Path, model_type: str) -> None:
    with make_case(tmp_path, model_type) as case:
        assert_tokens(case, "in chunks")
        assert_tokens(case, "in turns")
        assert_forks(case)
        assert_snapshots(case)
        assert_planned(case)


def assert_tokens(case: Case, way: str) -> None:
    """Of all prompts, in a way of WAYS."""
    driven = drive(case.runner, [(prompt, GREEDY) for prompt in case.prompts], **WAYS[way])
    assert driven.outputs == case.expected
    assert (driven.preemptions > 0) == (way == "preempted")


def assert_forks(case: Case) -> None:
    """All sequences of a request are greedy, so they give the same tokens: those of ``generate``.
    One ends early: what begins then takes its slot."""
    requests = [(prompt, FORKING) for prompt in case.prompts[:2]]
    driven = drive(case.runner, requests, budget=32, stagger=3, num_slots=4)
    for (key, _), tokens in driven.outputs.items():
        assert tokens == case.expected[key, 0]
    assert len(driven.outputs) == 6


def test_sampled_forks_differ_and_do_not_depend_on_the_batch(trunk: Case) -> None:
    sampled = SamplingParams(temperature=1.0, max_tokens=8, ignore_eos=True, seed=7, n=3)
    prompt = trunk.prompts[1]
    alone = drive(trunk.runner, [(prompt, sampled)], budget=64).outputs
    beside = drive(
        trunk.runner, [(prompt, sampled)] + [(each, GREEDY) for each in trunk.prompts], budget=24
    ).outputs
    assert {index: tokens for (key, index), tokens in beside.items() if key == 0} == {
        index: tokens for (_, index), tokens in alone.items()
    }
    assert len({tuple(tokens) for tokens in alone.values()}) > 1


def test_prompt_logprobs_advance_a_state_once(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their forward pass is made several times."""
    monkeypatch.setattr(case.runner, "_most_logits", 7)
    asked = SamplingParams(
        temperature=0.0, max_tokens=NUM_NEW, ignore_eos=True, seed=0, prompt_logprobs=1
    )
    prompt = case.prompts[2]
    driven = drive(case.runner, [(prompt, asked)], budget=16)
    assert driven.outputs == {(0, 0): case.expected[2, 0]}
    found = prompt_logprobs_of(driven, 0).logprobs
    with torch.inference_mode():
        logits = eager(case.folder)(torch.tensor([prompt])).logits[0]
    right = logits.log_softmax(-1)
    for position, candidates in enumerate(found[1:], start=1):
        assert candidates is not None
        token = prompt[position]
        (own,) = [each.logprob for each in candidates if each.token_id == token]
        assert own == pytest.approx(float(right[position - 1, token]), abs=2e-3)


def test_a_prompt_goes_on_from_a_snapshot(case: Case) -> None:
    assert_snapshots(case)


def assert_snapshots(case: Case) -> None:
    """A prompt that comes again, one that begins like it, and its forks have the tokens of
    ``generate``, though all but the end of each is taken from a snapshot. So has a preempted
    sequence."""
    if not case.runner.info.num_snapshots:
        return  # as `make_case` has checked
    first, other = make_prompts(150, 150)
    longer = first + other[:9]
    expected = expected_outputs(eager(case.folder), [first, longer], NUM_NEW)
    requests = [(first, GREEDY), (longer, GREEDY), (first, GREEDY), (first, FORKING)]
    driven = drive(case.runner, requests, budget=64, stagger=40)
    for (key, _), tokens in driven.outputs.items():
        assert tokens == expected[int(key == 1), 0]
    cached = [driven.timings[key].timing.cached_prompt_tokens for key in range(4)]
    assert cached == [0, 144, 144, 144]

    requests = [(other, GREEDY), (first, GREEDY)]
    driven = drive(case.runner, requests, budget=64, num_blocks=20, watermark=0.0)
    assert driven.preemptions > 0
    assert driven.hit_tokens == 144
    assert driven.outputs[1, 0] == expected[0, 0]


def test_a_plan_counts_slots_and_blocks_as_the_load_does(case: Case) -> None:
    assert_planned(case)


def assert_planned(case: Case) -> None:
    """A plan runs the module without weights."""
    config = make_config(options_for(case.folder, max_model_len=256, max_num_seqs=8))
    footprint = weigh(config)
    info = case.runner.info
    assert case.runner._model.states is not None
    assert footprint.slot == case.runner._model.states.slot_bytes > 0
    assert footprint.cache == info.cache
    assert footprint.snapshots
    assert info.num_slots == 8
    slots = (info.num_slots + info.num_snapshots) * footprint.slot
    if footprint.block:
        assert info.kv_cache_bytes - slots == info.num_blocks * footprint.block


def test_batch_invariant_takes_opaque_caches(trunk: Case) -> None:
    runner = load(trunk.folder, batch_invariant=True)
    assert "state" in trunk.runner.info.cache
    assert runner.info.cache == "opaque"
    assert runner.info.num_snapshots == 0
    runner.close()


def test_adapters_change_layers_outside_of_modules_with_states(case: Case, tmp_path: Path) -> None:
    """The runner's first steps have an adapter of zeros for all of them."""
    runner = load(case.folder, adapters=str(tmp_path))
    states = runner._model.states
    assert states is not None
    for path in runner.sites:
        assert not any(path.startswith(f"{module.path}.") for module in states.modules)
    driven = drive(runner, [(case.prompts[0], GREEDY)])
    runner.close()
    assert driven.outputs == {(0, 0): case.expected[0, 0]}


def test_no_drafts_are_taken(trunk: Case) -> None:
    """A state cannot be taken back. A model with states is no draft model either."""
    llama = make_checkpoint(trunk.folder / "llama")
    speculation = {"drafter": "draft_model", "model": str(llama)}
    runner = load(trunk.folder, speculation=speculation)
    assert "state" in runner.info.cache
    runner.close()
    speculation = {"drafter": "draft_model", "model": str(trunk.folder)}
    options = options_for(llama, speculation=speculation)
    with pytest.raises(UnsupportedModelError, match="a state takes no drafts back"):
        load_runner(make_config({**options, "max_model_len": 256}))


@pytest.mark.parametrize(
    "model_type",
    [
        "qwen3_5_text",
        "lfm2",
        pytest.param("bamba", marks=pytest.mark.slow),
        pytest.param("jamba", marks=pytest.mark.slow),
    ],
)
def test_bfloat16_is_as_near_as_transformers(tmp_path: Path, model_type: str) -> None:
    """In chunks, the log-probabilities of a prompt are those of transformers in float32, but for
    the rounding."""
    folder = state_type(tmp_path, model_type)
    runner = load(folder, dtype="bfloat16")
    (prompt,) = make_prompts(70)
    asked = SamplingParams(temperature=0.0, max_tokens=2, seed=0, prompt_logprobs=0)
    driven = drive(runner, [(prompt, asked)], budget=16)
    runner.close()
    with torch.inference_mode():
        right = eager(folder)(torch.tensor([prompt])).logits[0].log_softmax(-1)
    errors = []
    for position, candidates in enumerate(prompt_logprobs_of(driven, 0).logprobs[1:], start=1):
        assert candidates is not None
        errors.append(abs(candidates[0].logprob - float(right[position - 1, prompt[position]])))
    assert sum(errors) / len(errors) < 0.15
