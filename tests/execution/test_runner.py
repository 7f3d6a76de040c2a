"""One step of the runner: which logits it asks for, what it returns per row, what it copies."""

import dataclasses
import logging
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from jitney.batch import Batch, Row
from jitney.engine.assemble import adapter_pool, load_runner
from jitney.errors import ConfigError
from jitney.execution import load, probe
from jitney.execution import runner as runner_module
from jitney.execution.runner import TorchRunner
from jitney.messages import Tokens
from jitney.read_config import make_config
from jitney.sampling_params import SamplingParams

from tests.execution.drive import drive, prompt_logprobs_of
from tests.tiny_models import VOCAB_SIZE, make_checkpoint

GREEDY = SamplingParams(temperature=0.0, seed=0, max_tokens=8, ignore_eos=True)
PROMPT = [(37 * i + 11) % VOCAB_SIZE for i in range(22)]


def options(path: Path, **more: object):
    given = {
        "model": str(path),
        "device": "cpu",
        "dtype": "float32",
        "attention": "reference",
        "prepack": False,
        "fuse": False,
        "threads": 1,
        "block_size": 4,
        "kv_cache_bytes": 1 << 20,
    }
    return make_config({**given, **more})


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("runner"), "qwen3")


@pytest.fixture
def runner(path: Path, request: pytest.FixtureRequest):
    """``request`` may name a type of cache."""
    runner = load_runner(options(path, kv_cache_dtype=getattr(request, "param", "auto")))
    yield runner
    runner.close()


@pytest.fixture(scope="module")
def model(path: Path):
    return transformers.AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager")


def logprobs_of(model, ids: list[int]) -> torch.Tensor:
    """[len(ids), vocabulary] by transformers' own attention."""
    with torch.inference_mode():
        return model(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)


def row(tokens: list[int], start: int, table: list[int], **fields: object) -> Row:
    base = Row(
        key=0,
        index=0,
        token_ids=tokens,
        start=start,
        block_table=table,
        sample=(0,),
        params=GREEDY,
        prompt=PROMPT,
        output=[],
        stop_ids=frozenset(),
        bad_words_ids=[],
    )
    return dataclasses.replace(base, **fields)


def test_a_crowd_of_sequences_is_sampled_in_slices(runner: TorchRunner, monkeypatch) -> None:
    """Prompts of n > 1 that end together: a hundred sequences of five rows, never at once."""
    params = SamplingParams(seed=3, n=40, temperature=1.5, top_p=0.9, logprobs=1)
    rows = [
        row([5], 0, [0], sample=tuple(range(40)), params=params),
        row(PROMPT[:3], 0, [1]),
        row([6], 0, [2], sample=()),
        row([7], 0, [3], sample=tuple(range(60)), params=params),
        row([8], 0, [4]),
    ]
    whole = runner.execute(Batch(rows=rows))
    assert len(set(whole.rows[0].token_ids)) > 5
    sizes = []

    def spy(logits, *others):
        sizes.append(logits.shape[0])
        return real(logits, *others)

    real = runner_module.sample
    monkeypatch.setattr(runner_module, "sample", spy)
    monkeypatch.setattr(runner_module, "_SAMPLED_FLOATS", 7 * runner.info.vocab_size)
    cut = runner.execute(Batch(rows=rows))
    assert cut == whole
    assert (max(sizes), sum(sizes)) == (7, 102)


def test_kernels_are_checked_on_blocks_of_the_size_in_service(path: Path, monkeypatch) -> None:
    sizes = []

    def note(*args, **more):
        sizes.append(more.get("block_size"))
        return real(*args, **more)

    real = load.probe.probe_logits
    monkeypatch.setattr(load.probe, "probe_logits", note)
    for size in (1, 16):
        load_runner(options(path, block_size=size)).close()
    assert sizes == [None, None, 1, None, None, 16]


def test_the_first_ring_runs_alone(path: Path, runner: TorchRunner) -> None:
    """Without kernels and quantization: the same tokens, and a refusal of what needs them."""
    alone = load.load_runner(options(path, attention="auto", fuse=True, prepack=True))
    assert alone.info.attention == "reference"
    requests = [(PROMPT, GREEDY)]
    assert drive(alone, requests).outputs == drive(runner, requests).outputs
    alone.close()
    with pytest.raises(ConfigError, match="option quantization is 'fp8'"):
        load.load_runner(options(path, quantization="fp8"))
    with pytest.raises(ConfigError, match="option batch_invariant needs attention kernels"):
        load.load_runner(options(path, batch_invariant=True))


def test_an_installation_without_the_second_ring_runs_in_plain_torch(
    path: Path, runner: TorchRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its entry points may still be there. What needs it is refused by name."""
    left_out = ("jitney.kernels", "jitney.quantization", "jitney.adapters")
    for name in {*left_out, *sys.modules}:
        if name.startswith(left_out):
            monkeypatch.setitem(sys.modules, name, None)
    plain = load_runner(options(path, attention="auto"))
    assert plain.info.attention == "reference"
    requests = [(PROMPT, GREEDY)]
    assert drive(plain, requests).outputs == drive(runner, requests).outputs
    with pytest.raises(ConfigError, match=r"option adapters is .*: adapters are not installed"):
        adapter_pool(options(path, adapters=str(path)), plain)
    with pytest.raises(ConfigError, match="option quantization is 'int8'"):
        load_runner(options(path, quantization="int8"))
    with pytest.raises(ConfigError, match="option attention is 'cpu', but must be auto"):
        load_runner(options(path, attention="cpu"))
    plain.close()


def test_rows_that_sample_beside_rows_that_do_not(runner: TorchRunner, model) -> None:
    rows = [
        row(PROMPT[:7], 0, [9, 3]),
        row(PROMPT[:9], 0, [4, 5, 6], sample=()),
        row(PROMPT, 0, [20, 11, 12, 13, 14, 15]),
    ]
    output = runner.execute(Batch(rows=rows)).rows
    expected = [logprobs_of(model, PROMPT[:n])[-1].argmax().item() for n in (7, 22)]
    assert [o.token_ids for o in output] == [[expected[0]], [], [expected[1]]]


@pytest.mark.parametrize("runner", ["auto", "int8"], indirect=True)
def test_copies_come_before_the_step(runner: TorchRunner, model) -> None:
    """A block is forked: both sequences go on from it, each with a token of its own. A chain of
    copies reads every source as it was before the step."""
    runner.execute(Batch(rows=[row(PROMPT[:6], 0, [0, 1], sample=())]))
    runner.execute(Batch(rows=[], copies=[(1, 2), (0, 7)]))
    rows = [row([5], 6, [7, 1]), row([9], 6, [0, 3])]
    output = runner.execute(Batch(rows=rows, copies=[(2, 3), (3, 4)])).rows
    expected = [logprobs_of(model, [*PROMPT[:6], t])[-1].argmax().item() for t in (5, 9)]
    assert [o.token_ids for o in output] == [[expected[0]], [expected[1]]]


def test_several_sequences_of_one_prompt(runner: TorchRunner, model) -> None:
    """n = 3 samples three first tokens from one row of logits, then forks."""
    params = SamplingParams(n=3, temperature=1.5, seed=7, max_tokens=6, logprobs=0, ignore_eos=True)
    driven = drive(runner, [(PROMPT, params)])
    again = drive(runner, [(PROMPT[:3], GREEDY), (PROMPT, params)], budget=5)
    streams = [driven.outputs[0, i] for i in range(3)]
    assert [again.outputs[1, i] for i in range(3)] == streams
    assert len({tuple(s) for s in streams}) == 3
    for index, stream in enumerate(streams):
        expected = logprobs_of(model, PROMPT + stream)[len(PROMPT) - 1 : -1]
        chosen = expected.gather(1, torch.tensor(stream)[:, None])[:, 0]
        events = [e for e in driven.events if isinstance(e, Tokens) and e.index == index]
        got = [entry[0].logprob for e in events for entry in e.logprobs]
        assert torch.tensor(got) == pytest.approx(chosen, abs=1e-4)


@pytest.mark.parametrize("budget", [512, 22, 7, 1])
def test_prompt_logprobs_over_chunks(runner: TorchRunner, model, budget: int) -> None:
    params = SamplingParams(temperature=0.0, seed=0, max_tokens=3, prompt_logprobs=2, logprobs=1)
    driven = drive(runner, [(PROMPT, params), (PROMPT[:9], GREEDY)], budget=budget)
    found = prompt_logprobs_of(driven, 0).logprobs
    expected = logprobs_of(model, PROMPT)
    assert found[0] is None
    assert len(found) == len(PROMPT)
    for position, entry in enumerate(found[1:], start=1):
        values = expected[position - 1]
        assert entry[0].token_id == PROMPT[position]
        for candidate in entry:
            assert candidate.logprob == pytest.approx(values[candidate.token_id].item(), abs=1e-4)
            rank = int((values > values[candidate.token_id]).sum()) + 1
            assert candidate.rank == rank


def test_logits_that_are_not_finite_fail_their_row_alone(runner: TorchRunner, model) -> None:
    bad = 77
    with torch.no_grad():
        runner._model.module.get_input_embeddings().weight[bad] = float("nan")
    rows = [
        row(PROMPT[:5], 0, [0, 1]),
        row([3, bad, 4], 0, [2], sample=(0, 1)),
        row([3, 4], 0, [5]),
    ]
    output = runner.execute(Batch(rows=rows)).rows
    assert "finite" in str(output[1].error)
    assert output[1].token_ids == []
    for index, ids in ((0, PROMPT[:5]), (2, [3, 4])):
        assert output[index].error is None
        assert output[index].token_ids == [logprobs_of(model, ids)[-1].argmax().item()]


def test_what_it_says_of_itself(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="jitney"):
        runner = load_runner(options(path, max_model_len=100, max_num_batched_tokens=33))
    info = runner.info
    assert (info.max_model_len, info.block_size, info.max_num_batched_tokens) == (100, 4, 33)
    assert (info.dtype, info.device, info.attention) == ("float32", "cpu", "reference")
    assert info.num_blocks == (1 << 20) // (4 * 2 * 2 * 2 * 16 * 4)
    assert info.eos_ids == {2}
    assert torch.get_num_threads() == 1
    ledgers = [r.message for r in caplog.records if r.message.startswith("memory: ")]
    assert len(ledgers) == 1
    assert f"{info.num_blocks} blocks" in ledgers[0].replace(",", "")
    assert "context 100, cache paged, in " in caplog.messages[-1]


def test_a_small_model_is_proved_by_one_thread(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads that wait for one another take a load ten times as long on a busy machine."""
    seen: list[int] = []
    compare = probe.compare_with_eager

    def note(*arguments: Any) -> None:
        seen.append(torch.get_num_threads())
        compare(*arguments)

    monkeypatch.setattr(probe, "compare_with_eager", note)
    try:
        load_runner(options(path, threads=2)).close()
        assert seen == [1]
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)


def test_the_default_budget_has_a_token_for_each_sequence(path: Path) -> None:
    for sequences, budget in ((256, 512), (700, 700)):
        runner = load_runner(options(path, max_num_seqs=sequences))
        assert runner.info.max_num_batched_tokens == budget


def test_sixteen_bits(path: Path, model) -> None:
    """bf16 weights and cache: close to f32; and caches of f32 and of bytes beside bf16 weights."""
    expected = logprobs_of(model, PROMPT)[-1]
    params = SamplingParams(temperature=0.0, seed=0, max_tokens=1, logprobs=5)
    for cache in ("auto", "float32", "int8"):
        runner = load_runner(options(path, dtype="bfloat16", kv_cache_dtype=cache))
        assert runner.info.dtype == "bfloat16"
        output = runner.execute(Batch(rows=[row(PROMPT, 0, [1, 2, 3, 4, 5, 6], params=params)]))
        for entry in output.rows[0].logprobs[0]:
            assert entry.logprob == pytest.approx(expected[entry.token_id].item(), abs=0.4)
