"""The offline class over a tiny model: the same engine as the server's, in this process or in one
of its own."""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import psutil
import pytest
import torch
from jitney import LLM, SamplingParams
from jitney.config import EngineConfig
from jitney.engine.supervisor import SupervisedEngine
from jitney.errors import (
    CheckpointError,
    ConfigError,
    DeadlineExceededError,
    InternalError,
    InvalidArgumentError,
)
from jitney.execution.runner import TorchRunner
from jitney.messages import Event, Finish, Finished
from jitney.sampling_params import StructuredOutputs
from jitney.text.completion import Completion
from transformers import AutoModelForCausalLM

from tests.execution.generate import eager, expected_outputs
from tests.tiny_models import make_checkpoint

PROMPTS = ["the bus", "def step(batch):", "Zürich", "passengers board while others"] * 3
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("llm") / "llama", "llama", tokenizer=True)


def load(folder: Path, **options: object) -> LLM:
    """In f32 with the attention in plain torch: nothing to compile, and no threads to wait for."""
    plain = {"dtype": "float32", "device": "cpu", "attention": "reference", "threads": 1}
    return LLM(folder, **plain, kv_cache_bytes=8 << 20, **options)


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with load(folder, max_num_seqs=4) as llm:
        yield llm


@pytest.fixture(autouse=True)
def nothing_left(llm: LLM) -> Iterator[None]:
    """After each test nothing is open and every block is free."""
    yield
    assert len(llm._open) == 0
    llm._engine.engine.scheduler.check_integrity()
    assert llm._engine.engine.scheduler.stats().blocks_used == 0


def test_results_come_in_order_and_are_the_models(llm: LLM, folder: Path) -> None:
    results = llm.generate(PROMPTS, GREEDY, progress=False)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for prompt, result in zip(PROMPTS, results, strict=True):
        ids = llm.tokenizer.encode(prompt)
        assert result.prompt_ids == ids
        made = model.generate(
            torch.tensor([ids]), max_new_tokens=12, do_sample=False, eos_token_id=-1
        )
        assert result.ids == made[0, len(ids) :].tolist()
        assert result.text == llm.tokenizer.decode(result.ids)
        assert result.finish_reason == "length"
        assert result.timing.total_s > 0


def test_batch_and_order_do_not_change_what_is_drawn(llm: LLM) -> None:
    params = [SamplingParams(seed=i, n=1 + i % 2, top_p=0.9, max_tokens=9) for i in range(12)]
    together = llm.generate(PROMPTS, params, progress=False)
    alone = [
        llm.generate(prompt, each, progress=False)[0]
        for prompt, each in zip(PROMPTS, params, strict=True)
    ]
    for one, other in zip(together, alone, strict=True):
        assert [each.ids for each in one.sequences] == [each.ids for each in other.sequences]


def test_a_stream_adds_up_to_the_whole(llm: LLM) -> None:
    params = SamplingParams(seed=3, max_tokens=20, logprobs=2, ignore_eos=True)
    (free,) = llm.generate("the bus", params, progress=False)
    params = msgspec.structs.replace(params, stop=(free.text[-4:-2],))
    (whole,) = llm.generate("the bus", params, progress=False)
    assert whole.text == free.text[: free.text.index(params.stop[0])]
    pieces = list(llm.stream("the bus", params))
    assert len(pieces) > 1
    assert "".join(piece.text for piece in pieces) == whole.text
    assert [each for piece in pieces for each in piece.ids] == whole.ids
    assert [each for piece in pieces for each in piece.logprobs] == whole.sequences[0].logprobs
    assert [piece.finish_reason for piece in pieces[-2:]] == [None, "stop"]


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (SamplingParams(temperature="hot"), "temperature is 'hot', but must be a number"),
        (SamplingParams(logit_bias=[1]), "logit_bias is "),
        (5, "but must be SamplingParams, or a mapping of names and values, or a list"),
        ({"max_token": 5}, "'max_token' is unknown"),
    ],
)
def test_params_of_other_types_are_refused(llm: LLM, params: object, message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        llm.generate(["the bus"], [params], progress=False)
    with pytest.raises(InvalidArgumentError):
        llm.stream("the bus", params)


def test_closing_a_stream_frees_its_blocks(llm: LLM) -> None:
    stream = llm.stream("the bus", GREEDY)
    next(stream)
    assert llm._engine.engine.scheduler.stats().blocks_used > 0
    stream.close()
    assert llm._engine.engine.scheduler.stats().blocks_used == 0


def test_prompts_as_ids(llm: LLM) -> None:
    ids = llm.tokenizer.encode("the bus")
    (text,) = llm.generate("the bus", GREEDY, progress=False)
    (bare,) = llm.generate(ids, GREEDY, progress=False)
    (listed,) = llm.generate([ids], GREEDY, progress=False)
    assert text.ids == bare.ids == listed.ids
    assert llm.generate([], GREEDY, progress=False) == []
    (drawn,) = llm.generate((each for each in ["the bus"]), GREEDY, progress=False)
    assert drawn.ids == text.ids
    with pytest.raises(InvalidArgumentError, match="must be texts or lists of token ids"):
        llm.generate(np.array(ids), GREEDY, progress=False)


def test_chat(llm: LLM) -> None:
    chat = [{"role": "user", "content": "the bus"}]
    (text,) = llm.generate("user: the bus\nassistant: ", GREEDY, progress=False)
    (answer,) = llm.chat(chat, GREEDY, progress=False)
    assert answer.ids == text.ids
    assert [each.ids for each in llm.chat([chat, chat], GREEDY, progress=False)] == [text.ids] * 2
    (bare,) = llm.chat(
        chat, GREEDY, chat_template_parameters={"add_generation_prompt": False}, progress=False
    )
    assert bare.prompt_ids == llm.tokenizer.encode("user: the bus\n")
    with pytest.raises(InvalidArgumentError, match="only these are allowed"):
        llm.chat(chat, chat_template_parameters={"tools": []})


def test_everything_is_checked_before_anything_runs(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llm._engine, "send", lambda message: pytest.fail("a request was sent"))
    with pytest.raises(InvalidArgumentError, match="text_input is ''"):
        llm.generate(["the bus", ""], GREEDY)
    with pytest.raises(InvalidArgumentError, match="params has 1 entries, but there are 2"):
        llm.generate(["a", "b"], [GREEDY])
    with pytest.raises(InvalidArgumentError, match="prompts is 5, but must be texts or lists"):
        llm.generate(["a", 5], GREEDY)
    with pytest.raises(InvalidArgumentError, match="context holds 256"):
        llm.stream("the bus", SamplingParams(max_tokens=256))


def test_more_prompts_than_the_queue_takes(folder: Path) -> None:
    with load(folder, max_num_seqs=2, max_queued=1) as llm:
        results = llm.generate(["the bus"] * 7, GREEDY, progress=False)
    assert [each.error for each in results] == [None] * 7


def test_more_prompts_than_the_queue_of_a_tier_takes(folder: Path) -> None:
    tiers = [{"name": "short", "max_queued": 1}, {"name": "long"}]
    params = msgspec.structs.replace(GREEDY, tier="short")
    with load(folder, max_num_seqs=2, tiers=tiers) as llm:
        results = llm.generate(["the bus"] * 7, params, progress=False)
        assert [each.error for each in results] == [None] * 7
        assert llm.capacity_for([None]) == 4, "the queue of another tier limits nothing"


def test_a_failed_request_stops_no_other(llm: LLM) -> None:
    late = SamplingParams(max_tokens=5, deadline_ms=1e-6)
    good, failed = llm.generate(["the bus", "the bus"], [GREEDY, late], progress=False)
    assert len(good.ids) == 12
    assert failed.sequences == []
    with pytest.raises(DeadlineExceededError):
        _ = failed.text
    with pytest.raises(DeadlineExceededError):
        list(llm.stream("the bus", late))


def test_an_interrupt_aborts_what_is_open(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    other = llm.stream("the bus", GREEDY)
    next(other)
    with monkeypatch.context() as patch:

        def interrupted(batch: object) -> None:
            raise KeyboardInterrupt

        patch.setattr(llm._engine.engine.runner, "launch", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(PROMPTS, GREEDY, progress=False)
    with pytest.raises(InternalError, match="the engine was interrupted"):
        next(other)
    (again,) = llm.generate("the bus", GREEDY, progress=False)
    assert len(again.ids) == 12


def test_an_interrupt_between_two_events_of_a_step_aborts_what_is_open(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = llm.stream("the bus", GREEDY)
    next(other)
    feed = Completion.feed

    def interrupted(completion: Completion, event: Event) -> Finish | None:
        finish = feed(completion, event)
        if isinstance(event, Finished):
            raise KeyboardInterrupt
        return finish

    with monkeypatch.context() as patch:
        patch.setattr(Completion, "feed", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate("the bus", msgspec.structs.replace(GREEDY, max_tokens=2), progress=False)
    with pytest.raises(InternalError, match="the engine was interrupted"):
        list(other)
    (again,) = llm.generate("the bus", GREEDY, progress=False)
    assert len(again.ids) == 12


def test_closed(folder: Path) -> None:
    llm = load(folder)
    stream = llm.stream("the bus", GREEDY)
    next(stream)
    llm.close()
    llm.close()
    with pytest.raises(InvalidArgumentError, match="has been closed"):
        next(stream)
    with pytest.raises(InvalidArgumentError, match="has been closed"):
        llm.generate("the bus")


def test_what_cannot_be_loaded(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean 'block_size'"):
        LLM(tmp_path, blok_size=3)
    with pytest.raises(CheckpointError):
        LLM(tmp_path)
    with pytest.raises(ConfigError, match="neither a folder nor in the local hub cache"):
        LLM(tmp_path / "none")


def fail(*args: object) -> None:
    raise RuntimeError("after the load")


def test_what_fails_after_the_load_gives_the_model_back(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[TorchRunner] = []
    monkeypatch.setattr("jitney.llm.checker_first_line", fail)
    monkeypatch.setattr(TorchRunner, "close", lambda runner: closed.append(runner))
    with pytest.raises(RuntimeError, match="after the load"):
        load(folder)
    assert len(closed) == 1


# ---------------------------------------------------------------- with the engine in a process


def test_what_fails_after_the_load_leaves_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[psutil.Process] = []

    class Noted(SupervisedEngine):
        def __init__(self, config: EngineConfig) -> None:
            super().__init__(config, "tests.engine.deadly_runner:loader")

        def start(self) -> bytes:
            data = super().start()
            started.append(psutil.Process(self.pid))
            return data

    monkeypatch.setattr("jitney.llm.SupervisedEngine", Noted)
    with pytest.raises(msgspec.DecodeError):  # the fake loader's tokenizer is none
        LLM("fine", process=True, block_size=4)
    assert not started[0].is_running()


@pytest.fixture(scope="module")
def apart(folder: Path) -> Iterator[LLM]:
    with load(folder, process=True, max_num_seqs=4) as llm:
        yield llm


def test_an_interrupt_leaves_the_process_as_it_is(
    llm: LLM, apart: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = apart.stream("the bus", GREEDY)
    next(other)
    with monkeypatch.context() as patch:

        def interrupted() -> None:
            raise KeyboardInterrupt

        patch.setattr(apart._engine, "step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            apart.generate(PROMPTS, GREEDY, progress=False)
    with pytest.raises(InternalError, match="the engine was interrupted"):
        list(other)
    again = apart.generate(PROMPTS, GREEDY, progress=False)
    assert again[0].ids == llm.generate(PROMPTS[0], GREEDY, progress=False)[0].ids


def test_a_process_that_does_not_come_up_fails_requests_one_by_one(apart: LLM) -> None:
    apart._engine._give_up("the engine does not stay up")
    results = apart.generate(PROMPTS, GREEDY, progress=False)
    assert {result.error.code for result in results if result.error} == {"UNAVAILABLE"}
    assert all(result.error for result in results)
    apart._engine._refusal = None


SCRIPT = """
import sys
from jitney import LLM, SamplingParams

llm = LLM(sys.argv[1], process=True, device="cpu", attention="reference")
print(llm.generate("the bus", SamplingParams(max_tokens=4), progress=False)[0].ids)
assert "torch" not in sys.modules and "transformers" not in sys.modules
print(llm._engine.pid)
"""


@pytest.mark.slow
def test_a_script_that_closes_nothing_leaves_no_process(folder: Path) -> None:
    """It imports no torch, and needs no ``if __name__ == "__main__"``."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(folder)], capture_output=True, text=True, timeout=300
    )
    assert (done.returncode, done.stderr) == (0, "")
    engine = int(done.stdout.split()[-1])
    assert not psutil.pid_exists(engine) or psutil.Process(engine).status() == "zombie"


def test_structured_outputs(llm: LLM) -> None:
    """Of a model that writes anything: every complete output fits, and every refusal is named."""
    schema = {
        "type": "object",
        "properties": {"stop": {"enum": ["north", "south"]}, "seats": {"type": "integer"}},
        "required": ["stop", "seats"],
        "additionalProperties": False,
    }
    params = SamplingParams(
        n=3, max_tokens=60, seed=5, structured_outputs=StructuredOutputs(json=schema)
    )
    ends = set()
    for result in llm.generate(PROMPTS, params, progress=False):
        for sequence in result.sequences:
            ends.add(sequence.finish_reason)
            if sequence.finish_reason == "stop":
                read = json.loads(sequence.text)
                assert list(read) == ["stop", "seats"]
                assert read["stop"] in ("north", "south")
                assert isinstance(read["seats"], int)
            else:
                assert len(sequence.ids) == 60
    assert "stop" in ends
    forbidden = SamplingParams(
        structured_outputs=StructuredOutputs(choice=("yes",)), allowed_token_ids=(5,)
    )
    (result,) = llm.generate("the bus", forbidden, progress=False)
    assert "structured_outputs" in str(result.error)
    for refused, named in (({"regex": "a("}, "regex"), ({"json": {"not": {}}}, "#/not")):
        params = SamplingParams(structured_outputs=StructuredOutputs(**refused))
        with pytest.raises(InvalidArgumentError, match=named):
            llm.generate("the bus", params)


# ------------------------------------------------------------------------------- generation_config


STATED = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "max_new_tokens": 3}


def with_generation_config(folder: Path, to: Path, **fields: object) -> Path:
    """A copy of the checkpoint that states these fields."""
    shutil.copytree(folder, to)
    (to / "generation_config.json").write_text(json.dumps(fields))
    return to


def sampled_with(llm: LLM, params: object) -> SamplingParams:
    """The parameters that the engine gets for a prompt."""
    asked = []
    start = llm.start

    def note(submit):
        asked.append(submit.params)
        return start(submit)

    llm.start = note
    llm.generate("the bus", params, progress=False)
    llm.start = start
    return asked[0]


def test_the_checkpoint_states_what_a_caller_leaves_unset(folder: Path, tmp_path: Path) -> None:
    with load(with_generation_config(folder, tmp_path / "m", **STATED)) as own:
        assert own.info.sampling_defaults == {"temperature": 0.6, "top_k": 20, "top_p": 0.95}
        nothing = sampled_with(own, None)
        assert (nothing.temperature, nothing.top_k, nothing.top_p) == (0.6, 20, 0.95)
        assert nothing.max_tokens == 16
        some = sampled_with(own, SamplingParams(top_k=5, max_tokens=2))
        assert (some.temperature, some.top_k, some.max_tokens) == (0.6, 5, 2)
        exact = sampled_with(own, {"temperature": 1.0})
        assert (exact.temperature, exact.top_k) == (1.0, 20)
        (plain,) = own.requests([[5]], SamplingParams())
        assert (plain.params.temperature, plain.params.top_k) == (1.0, 0)


def test_generation_config_none_leaves_it_out(folder: Path, tmp_path: Path) -> None:
    stated = with_generation_config(folder, tmp_path / "m", **STATED, repetition_penalty="odd")
    with load(stated, generation_config="none") as own:
        assert own.info.sampling_defaults == {}
        assert sampled_with(own, None).temperature == 1.0
    with pytest.raises(CheckpointError, match=r"generation_config.json .*repetition_penalty is"):
        load(stated)


def test_a_checkpoint_that_does_not_sample_is_greedy(folder: Path, tmp_path: Path) -> None:
    stated = with_generation_config(folder, tmp_path / "m", do_sample=False, temperature=0.6)
    with load(stated) as own:
        assert own.info.sampling_defaults == {"temperature": 0.0}


# ------------------------------------------------------------------------------- no tokenizer


@pytest.mark.parametrize("process", [False, True])
def test_a_checkpoint_without_a_tokenizer_serves_token_ids(tmp_path: Path, process: bool) -> None:
    """With the tokens of ``generate``. What has a text is refused by its name."""
    path = make_checkpoint(tmp_path / "m", "llama")
    (expected,) = expected_outputs(eager(path), [[5, 6, 7]], 12).values()
    with load(path, process=process) as own:
        done = own.generate([5, 6, 7], GREEDY, progress=False)[0]
        assert (done.ids, done.text) == (expected, "")
        assert [piece.ids for piece in own.stream([5, 6, 7], GREEDY)] != []
        for field, params in (
            ("stop", {"stop": "x"}),
            ("bad_words", {"bad_words": ["x"]}),
            ("structured_outputs", {"structured_outputs": {"choice": ["x"]}}),
        ):
            with pytest.raises(InvalidArgumentError, match=f"^{field} cannot be used: .*input_ids"):
                own.generate([5], params, progress=False)
        with pytest.raises(InvalidArgumentError, match=r"^text_input cannot be used"):
            own.generate("the bus", progress=False)
        with pytest.raises(InvalidArgumentError, match=r"^messages cannot be used"):
            own.chat([{"role": "user", "content": "a"}], progress=False)
