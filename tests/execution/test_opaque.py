"""Models that no paged cache fits run with transformers' own cache objects, and give the tokens of
its ``generate`` whatever batch, chunks, preemption, forks, failures and replays do."""

import dataclasses
import logging
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from jitney.engine.assemble import load_runner, weigh
from jitney.engine.engine import Engine
from jitney.errors import ConfigError, UnsupportedModelError
from jitney.execution.load_opaque import plan_opaque
from jitney.execution.low_rank import zero_factors
from jitney.execution.memory import logits_bytes
from jitney.execution.opaque import Computed, OpaqueModule
from jitney.execution.opaque_runner import OpaqueRunner
from jitney.execution.support import context_length
from jitney.messages import Cancel, Emitted, Finished, Submit, Tokens
from jitney.read_config import make_config
from jitney.sampling_params import SamplingParams
from msgspec.structs import replace
from transformers import PreTrainedConfig

from benchmarks.architectures.tiny import make_checkpoint
from tests.execution.drive import drive, prompt_logprobs_of
from tests.execution.generate import eager, expected_outputs, make_prompts
from tests.execution.like_generate import options_for
from tests.inline import make_at_once

COUNT = 16
LENGTHS = (1, 5, 17, 40)
GREEDY = SamplingParams(temperature=0.0, max_tokens=COUNT, ignore_eos=True, seed=0)

TYPES = ["gpt_neo", "moshi", "rwkv"]
"""Keys and values; keys and values that cannot be cut into chunks; a state."""
TRUNK = "rwkv"
"""The type that is taken where one is enough: its cache has no length that would betray it."""


@dataclasses.dataclass
class Case:
    """A checkpoint of one type, its runner, and what ``generate`` makes of each prompt alone."""

    folder: Path
    runner: OpaqueRunner
    prompts: list[list[int]]
    expected: dict[tuple[int, int], list[int]]

    @property
    def requests(self) -> list[tuple[list[int], SamplingParams]]:
        return [(prompt, GREEDY) for prompt in self.prompts]


def make_case(folder: Path, model_type: str, **options: object) -> Case:
    make_checkpoint(folder, model_type)
    prompts = make_prompts(*LENGTHS)
    expected = expected_outputs(eager(folder), prompts, COUNT)
    assert len({token for tokens in expected.values() for token in tokens}) > 8
    runner = load_runner(make_config(options_for(folder, **options)))
    assert isinstance(runner, OpaqueRunner)
    return Case(folder, runner, prompts, expected)


@pytest.fixture(scope="module", params=TYPES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    torch.set_num_threads(1)
    return make_case(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def trunk(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return make_case(tmp_path_factory.mktemp("trunk"), TRUNK)


# ---------------------------------------------------------------------- ways to run


def test_a_batch(case: Case) -> None:
    assert drive(case.runner, case.requests).outputs == case.expected


def test_chunks(case: Case) -> None:
    driven = drive(case.runner, case.requests, budget=8, max_num_seqs=8, stagger=2)
    assert driven.outputs == case.expected


def test_preemption(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens behind a prompt are computed again as they were: each in a pass of its own."""
    compute = OpaqueModule.compute
    first_passes = set()

    def note(self: OpaqueModule, ids: torch.Tensor, start: int, cache: object, num_logits=1):
        if start == 0:
            first_passes.add(len(ids))
        return compute(self, ids, start, cache, num_logits)

    monkeypatch.setattr(OpaqueModule, "compute", note)
    driven = drive(case.runner, case.requests, num_blocks=4, watermark=0.0)
    assert driven.preemptions > 0
    assert driven.outputs == case.expected
    assert first_passes == set(LENGTHS)


def test_uncut_prompts(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(case.runner, "info", replace(case.runner.info, chunking="whole"))
    driven = drive(case.runner, case.requests, budget=8, max_num_seqs=8, num_blocks=4)
    assert driven.outputs == case.expected


def test_forks(case: Case) -> None:
    params = replace(GREEDY, n=3)
    driven = drive(case.runner, [(prompt, params) for prompt in case.prompts])
    for (key, _), tokens in driven.outputs.items():
        assert tokens == case.expected[key, 0]
    assert len(driven.outputs) == 3 * len(case.prompts)


def test_sampled_forks_do_not_depend_on_preemption(trunk: Case) -> None:
    params = SamplingParams(temperature=1.0, max_tokens=COUNT, ignore_eos=True, seed=3, n=3)
    requests = [(prompt, params) for prompt in trunk.prompts]
    calm = drive(trunk.runner, requests)
    short = drive(trunk.runner, requests, num_blocks=8, watermark=0.0)
    assert short.preemptions > calm.preemptions
    assert short.outputs == calm.outputs


def test_what_is_replayed(case: Case) -> None:
    """An engine has died: requests come again with what they have emitted."""
    engine = _engine(case)
    for key, prompt in enumerate(case.prompts):
        emitted = [Emitted(ids=case.expected[key, 0][:key])]
        engine.send(
            Submit(
                key=key,
                prompt=prompt,
                params=GREEDY,
                arrival=float(key),
                emitted=emitted if key else [],
                first_token=0.5 if key else None,
            )
        )
    streams = _run(engine)
    for key in range(len(case.prompts)):
        assert streams[key] == case.expected[key, 0][key:]


@pytest.mark.parametrize("at", [1, 2, 9])
def test_a_step_that_fails(trunk: Case, at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The third pass of a step raises, when other sequences have advanced already."""
    engine = _engine(trunk)
    for key, prompt in enumerate(trunk.prompts):
        engine.send(Submit(key=key, prompt=prompt, params=GREEDY, arrival=float(key)))
    compute = OpaqueModule.compute
    passes = iter(range(10_000))

    def fail_once(*args: object, **options: object) -> object:
        if next(passes) == 4 * at - 1:
            raise RuntimeError("a passing fault")
        return compute(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(OpaqueModule, "compute", fail_once)
    logging.disable(logging.ERROR)
    streams = _run(engine)
    logging.disable(logging.NOTSET)
    assert streams == {key: case for (key, _), case in trunk.expected.items()}


def test_a_slot_that_was_left_is_emptied(trunk: Case) -> None:
    engine = _engine(trunk, max_num_seqs=1)
    engine.send(Submit(key=9, prompt=trunk.prompts[3], params=GREEDY, arrival=0.0))
    for _ in range(3):
        engine.step()
    engine.send(Cancel(9))
    for key, prompt in enumerate(trunk.prompts):
        engine.send(Submit(key=key, prompt=prompt, params=GREEDY, arrival=float(key)))
    streams = _run(engine)
    for key in range(len(trunk.prompts)):
        assert streams[key] == trunk.expected[key, 0]


def test_the_cache_of_a_sequence_that_has_ended_is_freed(trunk: Case) -> None:
    """Its blocks are given to others. So their memory would be taken twice."""
    engine = _engine(trunk)
    for key, prompt in enumerate(trunk.prompts):
        params = replace(GREEDY, max_tokens=COUNT if key == 0 else 2)
        engine.send(Submit(key=key, prompt=prompt, params=params, arrival=float(key)))
    for _ in range(6):
        engine.step()
    assert len(engine.scheduler.live.running) == 1
    assert len(trunk.runner._caches) == 1
    _run(engine)


def _engine(case: Case, **options: object) -> Engine:
    config = make_config(options_for(case.folder, **options))
    return make_at_once(Engine(config, case.runner))


def _run(engine: Engine) -> dict[int, list[int]]:
    """All tokens by key, once everything has ended."""
    streams: dict[int, list[int]] = {}
    while engine.has_work:
        report = engine.step()
        engine.scheduler.check_integrity()
        for event in report.events if report else ():
            if isinstance(event, Tokens):
                streams.setdefault(event.key, []).extend(event.ids)
            else:
                assert isinstance(event, Finished) or event.key == 9, event
    return streams


def test_a_long_step_is_not_silent(
    trunk: Case, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A record after each layer, once the step has taken long: the watchdog takes it for progress,
    as ``tests/engine/test_watchdog.py`` shows of a step that compiles."""
    caplog.set_level(logging.INFO, logger="jitney")
    drive(trunk.runner, trunk.requests[:1])
    assert "goes on" not in caplog.text
    monkeypatch.setattr("jitney.execution.opaque_runner._SILENCE_S", 0.0)
    params = replace(GREEDY, max_tokens=1)
    drive(trunk.runner, [(trunk.prompts[2], params)])
    layers = trunk.runner._model.config.num_hidden_layers
    assert caplog.text.count("a step of 17 tokens goes on after 0 s") == layers == 2


# ---------------------------------------------------------------------- what comes with tokens


def test_prompt_logprobs(case: Case) -> None:
    params = replace(GREEDY, prompt_logprobs=0, max_tokens=2)
    driven = drive(case.runner, [(prompt, params) for prompt in case.prompts], budget=16)
    model = eager(case.folder)
    for key, prompt in enumerate(case.prompts):
        with torch.inference_mode():
            right = model(torch.tensor([prompt])).logits[0].log_softmax(-1)
        entries = prompt_logprobs_of(driven, key).logprobs
        assert entries[0] is None
        for position in range(1, len(prompt)):
            (entry,) = entries[position] or []
            assert entry.token_id == prompt[position]
            assert entry.logprob == pytest.approx(
                float(right[position - 1, prompt[position]]), abs=1e-3
            )


def test_logits_of_few_tokens_are_held_at_once(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes over the beginning of a prompt give those of its first tokens."""
    params = replace(GREEDY, prompt_logprobs=1)
    requests = [(prompt, params) for prompt in case.prompts]
    right = drive(case.runner, requests, max_num_seqs=8)
    compute = OpaqueModule.compute
    held = set()

    def note(self: OpaqueModule, *arguments: object) -> Computed:
        computed = compute(self, *arguments)  # type: ignore[arg-type]
        held.add(len(computed.logits))
        return computed

    monkeypatch.setattr(OpaqueModule, "compute", note)
    monkeypatch.setattr(case.runner, "_most_logits", 7)
    driven = drive(case.runner, requests, max_num_seqs=8)
    assert max(held) == (7 if case.runner._opaque.takes_num_logits else max(LENGTHS))
    assert driven.outputs == right.outputs
    for key in range(len(requests)):
        own = prompt_logprobs_of(right, key).logprobs
        for got, expected in zip(prompt_logprobs_of(driven, key).logprobs, own, strict=True):
            assert [each.token_id for each in got or []] == [
                each.token_id for each in expected or []
            ]
            assert [each.logprob for each in got or []] == pytest.approx(
                [each.logprob for each in expected or []], abs=1e-4
            )


def test_bits_do_not_depend_on_the_batch(tmp_path: Path) -> None:
    """With ``batch_invariant``: logprobs are the same alone, in a crowd, preempted and replayed."""
    case = make_case(tmp_path, "gpt_neo", batch_invariant=True)
    assert case.runner.info.chunking == "whole"
    params = replace(GREEDY, logprobs=2)
    requests = [(prompt, params) for prompt in case.prompts]
    crowd = drive(case.runner, requests, num_blocks=4, watermark=0.0)
    assert crowd.preemptions > 0
    alone = [drive(case.runner, [request]) for request in requests]
    for key, driven in enumerate(alone):
        mine = [event for event in crowd.events if isinstance(event, Tokens) and event.key == key]
        own = [event for event in driven.events if isinstance(event, Tokens)]
        assert [event.logprobs for event in mine] == [event.logprobs for event in own]


def test_an_adapter(tmp_path: Path) -> None:
    """Its products are added in each pass, as in the module with the product in its weight."""
    folder = make_checkpoint(tmp_path / "m", "gpt_neo")
    adapters = tmp_path / "adapters"
    adapters.mkdir()
    runner = load_runner(make_config(options_for(folder, adapters=str(adapters))))
    assert isinstance(runner, OpaqueRunner)
    path = "transformer.h.0.mlp.c_proj"
    factors = {path: zero_factors(runner.sites, 2)[path]}
    generator = torch.Generator().manual_seed(1)
    for factor in (factors[path].a, factors[path].b):
        factor.copy_(torch.randn(factor.shape, generator=generator) / 4)
    adapter = runner.make_adapter("v", factors)

    changed = eager(folder)
    weight = changed.get_submodule(path).weight
    with torch.no_grad():
        weight += (factors[path].a.T @ factors[path].b).T
    (prompt,) = make_prompts(12)
    expected = expected_outputs(changed, [prompt], COUNT)
    plain = expected_outputs(eager(folder), [prompt], COUNT)
    assert expected != plain
    engine = make_at_once(Engine(make_config(options_for(folder)), runner))
    engine.scheduler.submit(
        Submit(key=0, prompt=prompt, params=GREEDY, arrival=0.0), adapter=adapter
    )
    assert _run_scheduler(engine) == expected[0, 0]


def _run_scheduler(engine: Engine) -> list[int]:
    made: list[int] = []
    while engine.scheduler.has_work:
        batch = engine.scheduler.schedule(0.0)
        output = engine.runner.launch(batch).wait()
        for event in engine.scheduler.update(batch, output, 0.0):
            if isinstance(event, Tokens):
                made += event.ids
    return made


# ---------------------------------------------------------------------- the load


def test_the_trial_finds_chunks_that_go_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The module takes a second chunk as if nothing had come before it."""
    compute = OpaqueModule.compute

    def forget(self: OpaqueModule, ids: torch.Tensor, start: int, cache: object, num_logits=1):
        kept = None if len(ids) > 1 else cache
        return compute(self, ids, start, kept, num_logits)

    monkeypatch.setattr(OpaqueModule, "compute", forget)
    case = make_case(tmp_path, TRUNK)
    assert case.runner.info.chunking == "whole"
    driven = drive(case.runner, case.requests, budget=8, max_num_seqs=8, num_blocks=4)
    assert driven.outputs == case.expected


def test_a_module_whose_cache_is_wrong_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compute = OpaqueModule.compute

    def forget(self: OpaqueModule, ids: torch.Tensor, start: int, cache: object, num_logits=1):
        return compute(self, ids, start, None, num_logits)

    monkeypatch.setattr(OpaqueModule, "compute", forget)
    make_checkpoint(tmp_path, TRUNK)
    with pytest.raises(UnsupportedModelError, match="with its own cache transformers computes"):
        load_runner(make_config(options_for(tmp_path)))


@pytest.mark.parametrize("model_type", ["openai-gpt", "xlm", "recurrent_gemma"])
def test_what_keeps_no_cache_is_refused_by_name(tmp_path: Path, model_type: str) -> None:
    make_checkpoint(tmp_path, model_type)
    with pytest.raises(UnsupportedModelError) as caught:
        load_runner(make_config(options_for(tmp_path)))
    text = str(caught.value)
    assert text.startswith(f"models of type {model_type} cannot be served: transformers keeps no")
    assert "a paged cache does not fit: " in text


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"kv_cache_dtype": "bfloat16"}, "kv_cache_dtype"),
        ({"attention": "cpu"}, "attention"),
        ({"kv_cache_bytes": 64}, "kv_cache_bytes"),
    ],
)
def test_options_that_cannot_hold_are_refused(
    tmp_path: Path, options: dict[str, object], named: str
) -> None:
    make_checkpoint(tmp_path, TRUNK)
    with pytest.raises(ConfigError, match=f"option {named} "):
        load_runner(make_config(options_for(tmp_path, **options)))


def test_options_of_speed_have_no_effect(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    options = {"speculation": {"drafter": "ngram"}, "prefix_caching": True, "fuse": True}
    caplog.set_level(logging.INFO, logger="jitney")
    case = make_case(tmp_path, TRUNK, **options)
    assert "option speculation has no effect" in caplog.text
    assert "one sequence at a time" in caplog.text
    assert re.search(r"cache opaque \(\d+\.\d times as long for 8 sequences", caplog.text)
    engine = _engine(case, **options)
    for key in (0, 1):
        engine.send(Submit(key=key, prompt=case.prompts[2], params=GREEDY, arrival=0.0))
    assert _run(engine) == dict.fromkeys((0, 1), case.expected[2, 0])


def test_slots_that_take_nothing_are_as_many_as_may_run(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "gpt_neo")
    config = make_config(options_for(tmp_path, kv_cache_bytes=1 << 17, max_num_seqs=24))
    assert load_runner(config).info.num_slots == 24


def test_slots_and_blocks_share_the_bytes(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "moshi")
    config = make_config(options_for(tmp_path, kv_cache_bytes=1 << 20, max_num_seqs=512))
    runner = load_runner(config)
    assert isinstance(runner, OpaqueRunner)
    info = runner.info
    traits = runner._model.opaque_traits
    assert traits is not None
    assert traits.token_bytes > 0
    assert traits.fixed_bytes > 0
    used = info.num_slots * traits.fixed_bytes
    used += info.num_blocks * info.block_size * traits.token_bytes
    assert 0.9 * (1 << 20) < used <= 1 << 20
    assert 1 <= info.num_slots <= 512


def test_room_is_left_for_the_logits_of_all_tokens(
    trunk: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some modules compute no fewer, as that of xlstm."""
    model = trunk.runner._model
    assert model.opaque is not None
    config = make_config(options_for(trunk.folder, max_num_seqs=1))
    few = plan_opaque(config, model, trunk.runner.info).steps.total
    monkeypatch.setattr(model.opaque, "takes_num_logits", False)
    all_tokens = plan_opaque(config, model, trunk.runner.info).steps.total
    num_more = trunk.runner.info.max_num_batched_tokens - 1
    assert all_tokens - few == num_more * logits_bytes(model.vocab_size, model.dtype)


def test_a_plan_knows_what_a_sequence_takes(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, TRUNK)
    config = make_config(options_for(tmp_path))
    footprint = weigh(config)
    runner = load_runner(config)
    traits = runner._model.opaque_traits
    assert traits is not None
    assert (footprint.cache, footprint.slot) == ("opaque", traits.fixed_bytes)
    assert footprint.weights == runner._model.weight_bytes


def test_a_context_length_that_is_not_stated() -> None:
    assert context_length(make_config({"model": "m"}), PreTrainedConfig()) == 32_768


@pytest.fixture(autouse=True)
def _no_fault_is_left() -> Iterator[None]:
    yield
    logging.disable(logging.NOTSET)
