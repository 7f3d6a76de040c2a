"""The GPU's runner end to end, its kernels interpreted: the tokens of transformers and the CPU."""

import random
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from jitney.batch import Batch, Row
from jitney.engine.assemble import load_runner
from jitney.engine.engine import Engine
from jitney.errors import DeviceLostError
from jitney.messages import Cancel, Failed, Finished, Submit, Tokens
from jitney.read_config import make_config
from jitney.sampling_params import SamplingParams
from msgspec.structs import replace

from tests.execution.drive import drive, prompt_logprobs_of
from tests.execution.generate import eager, expected_outputs, make_prompts
from tests.kernels.gpu.small_gpu import GREEDY, options
from tests.kernels.gpu.test_graphs import FakeCapture
from tests.tiny_models import VOCAB_SIZE, make_checkpoint

pytest.importorskip("triton")
from jitney.kernels.gpu import gpu_accelerator as load_module
from jitney.kernels.gpu.graphs import DecodeGraphs

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="interpreted on a CPU")


@pytest.fixture(scope="module")
def runner(path: Path):
    runner = load_runner(options(path))
    yield runner
    runner.close()


def test_greedy_as_generate(path: Path, runner) -> None:
    """A mixed batch, chunked prompts, preemptions: what transformers' own loop gives alone."""
    prompts = make_prompts(5, 10, 7)
    expected = expected_outputs(eager(path), prompts, 6)
    requests = [(prompt, replace(GREEDY, max_tokens=6)) for prompt in prompts]
    driven = drive(runner, requests, budget=9, num_blocks=8)
    assert driven.outputs == expected
    assert driven.preemptions > 0


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["gemma2", "gpt_oss"])
def test_other_architectures(tmp_path: Path, architecture: str) -> None:
    """Windows, caps, sinks, experts: as on the CPU."""
    path = make_checkpoint(tmp_path, architecture, num_key_value_heads=1, num_attention_heads=2)
    params = replace(GREEDY, max_tokens=3)
    requests = [(list(range(5, 22)), params), ([9, 8, 7], params)]
    outputs = []
    for attention in ("gpu", "reference"):
        runner = load_runner(options(path, attention=attention))
        outputs.append(drive(runner, requests, budget=9).outputs)
        runner.close()
    assert outputs[0] == outputs[1]


@pytest.mark.slow  # the sampler is the CPU's: only logits come from these kernels
def test_samples_are_those_of_the_cpu(runner, plain) -> None:
    """Draws, filters, several sequences of a prompt (copied blocks), logprobs, penalties."""
    params = [
        SamplingParams(temperature=0.8, seed=3, max_tokens=5, ignore_eos=True),
        SamplingParams(temperature=1.2, top_k=7, top_p=0.8, seed=4, max_tokens=5, logprobs=2),
        SamplingParams(temperature=1.5, n=3, seed=5, max_tokens=4, ignore_eos=True),
        SamplingParams(temperature=0.0, repetition_penalty=1.3, seed=6, max_tokens=6),
    ]
    requests = [(list(range(9, 9 + 3 * n)), p) for n, p in enumerate(params, start=2)]
    got = drive(runner, requests, budget=11)
    right = drive(plain, requests, budget=11)
    assert got.outputs == right.outputs
    for event, other in zip(
        *([e for e in d.events if isinstance(e, Tokens) and e.key == 1] for d in (got, right)),
        strict=True,
    ):
        (mine,), (theirs,) = event.logprobs, other.logprobs
        assert [c.token_id for c in mine] == [c.token_id for c in theirs]
        assert [c.logprob for c in mine] == pytest.approx([c.logprob for c in theirs], abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("at_once", [3, 1000])
def test_prompt_logprobs(runner, plain, monkeypatch, at_once: int) -> None:
    """In chunks, beside other rows, and where the logits of a step do not fit at once."""
    monkeypatch.setattr(runner, "_most_logits", at_once)
    params = SamplingParams(temperature=0.0, seed=0, max_tokens=2, prompt_logprobs=1, logprobs=1)
    short = replace(GREEDY, max_tokens=2)
    requests = [(list(range(40, 53)), params), ([5, 6, 7], short), ([3, 4, 5, 6], params)]
    got, right = (drive(each, requests, budget=10) for each in (runner, plain))
    assert got.outputs == right.outputs
    for key in (0, 2):
        mine, theirs = (prompt_logprobs_of(each, key).logprobs for each in (got, right))
        assert len(mine) == len(theirs)
        assert mine[0] is None
        for a, b in zip(mine[1:], theirs[1:], strict=True):
            assert [c.token_id for c in a] == [c.token_id for c in b]
            assert [c.logprob for c in a] == pytest.approx([c.logprob for c in b], abs=1e-4)


# --------------------------------------------------------------------------- graphs


def test_graphs_give_what_kernels_give(path: Path, plain, monkeypatch) -> None:
    """Decodes in graphs, padded, with contexts that grow and batches that shrink: the same tokens
    as without."""
    capture = FakeCapture()
    monkeypatch.setattr(load_module, "capture_on", lambda device: capture)
    used: list[int] = []
    real = DecodeGraphs._decode

    def decode(self, size: int) -> None:
        used.append(size)
        real(self, size)

    monkeypatch.setattr(DecodeGraphs, "_decode", decode)
    runner = load_runner(options(path))
    requests = [
        (list(range(11, 17)), replace(GREEDY, max_tokens=9)),
        ([5, 6, 7], replace(GREEDY, max_tokens=5)),
        ([8], replace(GREEDY, max_tokens=3)),
    ]
    got = drive(runner, requests, stagger=2)
    assert got.outputs == drive(plain, requests, stagger=2).outputs
    assert set(used) == set(runner._run_tokens.graphs) == {1, 2, 4}
    assert capture.replays > 4
    assert capture.captures == 3
    runner.close()


@pytest.mark.slow
def test_capture_while_loading(path: Path, plain, monkeypatch) -> None:
    """All graphs are there before the first request, and none is captured after it."""
    capture = FakeCapture()
    monkeypatch.setattr(load_module, "capture_on", lambda device: capture)
    runner = load_runner(options(path, max_num_seqs=3))
    runner._run_tokens.capture_all()  # option "load" is refused where kernels are interpreted
    assert capture.captures == 3  # 1, 2 and 3 rows
    # The first step has as many tokens as a graph, all of them with logits, and is none of decodes.
    short = replace(GREEDY, max_tokens=3)
    requests = [([5, 6], replace(short, prompt_logprobs=0)), ([9], short)]
    assert drive(runner, requests).outputs == drive(plain, requests).outputs
    assert capture.captures == 3
    runner.close()


# --------------------------------------------------------------------------- in the engine


def run_engine(runner, submits: list[Submit], seed: int | None, **config: object):
    """Serve through an engine, cancelling at random. Returns tokens by (key, index) and ends."""
    given = {"model": "m", "block_size": 4, "max_num_seqs": 6, "max_num_batched_tokens": 24}
    engine = Engine(make_config({**given, **config}), runner)
    chance = random.Random(seed)
    waiting, open_keys = list(submits), set()
    tokens: dict[tuple[int, int], list[int]] = {}
    ends: dict[int, str] = {}
    for _ in range(2000):
        if waiting and chance.random() < 0.6:
            submit = waiting.pop(0)
            engine.send(submit)
            open_keys.add(submit.key)
        elif seed is not None and open_keys and chance.random() < 0.05:
            engine.send(Cancel(chance.choice(sorted(open_keys))))
        report = engine.step()
        for event in report.events if report is not None else ():
            assert not isinstance(event, Failed), event
            if isinstance(event, Tokens):
                tokens.setdefault((event.key, event.index), []).extend(event.ids)
            elif not isinstance(event, Tokens) and hasattr(event, "key"):
                ends[event.key] = type(event).__name__
                open_keys.discard(event.key)
        if report is None and not waiting:
            break
    engine.scheduler.check_integrity()
    assert set(ends) == {submit.key for submit in submits}
    return tokens, ends


def submits() -> list[Submit]:
    kinds = [
        SamplingParams(temperature=0.0, seed=1, max_tokens=9),
        SamplingParams(temperature=0.9, seed=2, max_tokens=8, ignore_eos=True),
        SamplingParams(temperature=1.1, top_p=0.9, n=2, seed=3, max_tokens=4, ignore_eos=True),
    ]
    return [
        Submit(
            key=key,
            prompt=[(13 * key + i) % VOCAB_SIZE for i in range(3 + 5 * key % 13)],
            params=kinds[key % 3],
            stop_ids=frozenset(range(30, 40)),
            arrival=0.0,
        )
        for key in range(8)
    ]


@pytest.mark.slow  # tests/core/test_overlap.py is its faster sister, without a model
def test_overlap_under_random_cancels(path: Path, plain, monkeypatch) -> None:
    """Steps launched ahead, over few blocks, with cancels, stops and preemptions, in graphs: every
    request gets the tokens that it gets from the CPU's runner, or the beginning of them."""
    monkeypatch.setattr(load_module, "capture_on", lambda device: FakeCapture())
    blocks = 10
    size = blocks * 4 * 2 * 16 * 4  # tokens, K and V, head size, bytes
    runner = load_runner(options(path, kv_cache_bytes=size, max_num_batched_tokens=24))
    assert runner.info.overlap
    assert runner.info.num_blocks == blocks
    carried = []
    launch = runner.launch

    def spy(batch: Batch):
        carried.extend(row for row in batch.rows if row.carried is not None)
        return launch(batch)

    runner.launch = spy
    right, _ = run_engine(plain, submits(), None)
    got, ends = run_engine(runner, submits(), 1)
    assert len(carried) > 15
    assert 0 < sum(end != "Finished" for end in ends.values()) < len(ends)
    for (key, index), tokens in right.items():
        mine = got.get((key, index), [])
        if ends[key] == Finished.__name__:
            assert mine == tokens
        else:
            assert mine == tokens[: len(mine)]
    runner.close()


def test_a_failed_launch_leaves_the_runner_usable(path: Path, plain, monkeypatch) -> None:
    """A step raises; the steps after it are right."""
    runner = load_runner(options(path))
    faults = [True, False, False, True]
    real = runner._run_tokens

    def forward(*args):
        if faults and faults.pop(0):
            raise RuntimeError("a passing fault")
        return real(*args)

    runner._run_tokens = forward
    submits = [
        Submit(key=key, prompt=[7 + key] * 3, params=params, stop_ids=frozenset(), arrival=0.0)
        for key, params in enumerate([replace(GREEDY, max_tokens=2)] * 2)
    ]
    got, _ = run_engine(runner, submits, None)
    assert not faults
    right, _ = run_engine(plain, submits, None)
    assert got == right
    runner.close()


def test_a_device_that_does_not_answer_is_lost(path: Path, monkeypatch) -> None:
    """A step that fails is the step's fault, unless the device cannot even be waited for."""
    runner = load_runner(options(path))

    def broken(*args):
        raise RuntimeError("an illegal memory access was encountered")

    runner._run_tokens = broken
    row = Row(
        key=0, index=0, token_ids=[7, 8], start=0, block_table=[0], sample=(0,), params=GREEDY,
        prompt=[7, 8], output=[], stop_ids=frozenset(), bad_words_ids=[],
    )  # fmt: skip
    with pytest.raises(RuntimeError, match="illegal memory access"):
        runner.execute(Batch([row]))
    full = torch.OutOfMemoryError("CUDA out of memory")
    runner._run_tokens = lambda *args: (_ for _ in ()).throw(full)
    with pytest.raises(MemoryError, match="CUDA out of memory"):
        runner.execute(Batch([row]))
    runner._run_tokens = broken
    monkeypatch.setattr("jitney.execution.runner.synchronize", broken)
    with pytest.raises(DeviceLostError):
        runner.execute(Batch([row]))


def test_a_kernel_that_is_compiled_is_a_sign_of_life(runner, monkeypatch) -> None:
    """Else the watchdog would take a step that compiles many for one that hangs."""
    import triton

    said = []
    monkeypatch.setattr(load_module._log, "info", lambda text, *of: said.append(text % of))
    fn = SimpleNamespace(name="attention.decode")
    assert not triton.knobs.runtime.jit_cache_hook(key="", repr="", fn=fn, already_compiled=False)
    assert said == ["preparing the kernel attention.decode"]


def test_an_empty_step_copies_blocks(runner, plain) -> None:
    """Copies come before the step, also where there is no step."""

    def row(tokens: list[int], start: int, table: list[int]) -> Row:
        return Row(
            key=0, index=0, token_ids=tokens, start=start, block_table=table, sample=(0,),
            params=GREEDY, prompt=[5, 6, 7, 8, 9], output=[], stop_ids=frozenset(),
            bad_words_ids=[],
        )  # fmt: skip

    results = []
    for each in (runner, plain):
        each.execute(Batch(rows=[row([5, 6, 7, 8], 0, [1])]))
        assert each.execute(Batch(rows=[], copies=[(1, 2), (1, 5)])).rows == []
        results.append(each.execute(Batch(rows=[row([9], 4, [5, 3])], copies=[(2, 3)])))
        assert each.execute(Batch(rows=[])).rows == []
    assert results[0] == results[1]
