"""The process that checks grammars, and the engine's thread that compiles them."""

import os
import select
import signal
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from jitney.engine import grammar_check
from jitney.engine.engine import Engine
from jitney.engine.grammar_check import NUM_PROCESSES, GrammarChecker
from jitney.errors import InternalError, InvalidArgumentError, UnavailableError
from jitney.messages import Cancel, Cancelled, Failed, Finished, Submit, Tokens
from jitney.read_config import make_config
from jitney.sampling_params import SamplingParams, StructuredOutputs
from jitney.text.grammar_process import CHECKER_MODULE, checker_first_line
from jitney.text.tokenizer import TokenizerData

from tests.fake_grammar import FakeGrammar
from tests.fake_runner import FakeRunner
from tests.solo_stream import solo_stream
from tests.text.tiny_tokenizers import tiny

ENDLESS = StructuredOutputs(json={"type": "integer", "multipleOf": 99_999_989})


def checker(**options: object) -> GrammarChecker:
    config = make_config({"model": "m", **options})
    data = TokenizerData(tiny("byte_level").to_str(), 1, None, {})
    info = msgspec.structs.replace(FakeRunner().info, vocab_size=500)
    return GrammarChecker(config, CHECKER_MODULE, checker_first_line(data, info, config))


def process_of(one: GrammarChecker) -> subprocess.Popen[bytes]:
    """The process that checks first: the only one if no two checks were made at once."""
    process = one._processes[-1]._process
    assert process is not None
    return process


def test_verdicts_are_kept_and_bounded() -> None:
    one = checker(grammar_cache=2)
    wanted = [StructuredOutputs(regex=text) for text in ("a", "b", "c")]
    assert [one.check(each) for each in wanted] == [one.check(each) for each in wanted]
    assert [one.knows(each) for each in wanted] == [False, True, True]
    one.check(wanted[1])
    one.check(wanted[0])
    assert [one.knows(each) for each in wanted] == [True, True, False], "what was asked for last"
    with pytest.raises(InvalidArgumentError, match=r"structured_outputs\.regex allows no text"):
        one.check(StructuredOutputs(regex=""))
    with pytest.raises(InvalidArgumentError, match="malformed"):
        one.check(StructuredOutputs(json={"type": "object", "required": 5}))
    one.close()


def test_the_same_is_checked_once_however_many_ask_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one = checker()
    real = GrammarChecker._check_in
    checks: list[bytes] = []
    gate = threading.Event()

    def check_in(self: GrammarChecker, process: object, asked: bytes) -> object:
        checks.append(asked)
        assert gate.wait(60)
        return real(self, process, asked)  # type: ignore[arg-type]

    monkeypatch.setattr(GrammarChecker, "_check_in", check_in)
    with ThreadPoolExecutor(3) as pool:
        asking = [pool.submit(one.check, StructuredOutputs(regex="a")) for _ in range(3)]
        time.sleep(0.2)  # a second check would begin at once
        gate.set()
        assert len({each.result(60) for each in asking}) == 1
    assert len(checks) == 1
    one.close()


class BusyMachine:
    """A machine that gives a process ``share`` of the time, and its clock. Time passes only when
    the process is looked at. After ``work_s`` seconds of processor time it answers, through a pipe.
    """

    def __init__(self, share: float, work_s: float) -> None:
        self.share = share
        self.work_s = work_s
        self.now = 0.0
        self.answer, self._output = os.pipe()

    def monotonic(self) -> float:
        return self.now

    def seconds_of(self, pid: int) -> float:
        self.now += 0.1
        used = self.share * self.now
        if used >= self.work_s:
            os.write(self._output, b"answer")
        return used

    def wait(self, patch: pytest.MonkeyPatch, most_s: float) -> None:
        """Wait for the answer as a check does that may take ``most_s`` seconds."""
        patch.setattr(grammar_check, "time", self)
        patch.setattr(grammar_check, "seconds_of", self.seconds_of)
        patch.setattr(grammar_check, "_LOOK_S", 0)
        process: Any = SimpleNamespace(pid=1)
        try:
            grammar_check._Limits(process, most_s).wait_for(self.answer, select.POLLIN)
        finally:
            os.close(self.answer)
            os.close(self._output)


@pytest.mark.parametrize("share", [1.0, 0.5, 0.1])
def test_a_busy_machine_refuses_nothing_that_an_idle_one_takes(
    monkeypatch: pytest.MonkeyPatch, share: float
) -> None:
    machine = BusyMachine(share, work_s=0.8)
    machine.wait(monkeypatch, most_s=1.0)
    assert machine.now >= 0.8 / share


@pytest.mark.parametrize("share", [1.0, 0.5, 0.1])
def test_a_busy_machine_refuses_what_an_idle_one_refuses(
    monkeypatch: pytest.MonkeyPatch, share: float
) -> None:
    with pytest.raises(grammar_check._StuckError) as caught:
        BusyMachine(share, work_s=1.5).wait(monkeypatch, most_s=1.0)
    assert caught.value.is_too_complex


@pytest.mark.parametrize("share", [0.0, 0.01])
def test_a_process_that_gets_no_time_is_not_refused_for_its_work(
    monkeypatch: pytest.MonkeyPatch, share: float
) -> None:
    machine = BusyMachine(share, work_s=0.8)
    with pytest.raises(grammar_check._StuckError) as caught:
        machine.wait(monkeypatch, most_s=1.0)
    assert not caught.value.is_too_complex
    assert machine.now < 1.0 + grammar_check._MOST_SLOWDOWN


def test_a_check_that_takes_too_long_ends_its_process() -> None:
    one = checker(grammar_timeout_s=2.0)
    one.check(StructuredOutputs(regex="a"))
    first = process_of(one)
    with pytest.raises(InvalidArgumentError, match=r"more than 2 s \(grammar_timeout_s\)"):
        one.check(ENDLESS)
    assert first.poll() == -signal.SIGKILL
    one.close()


def test_refusals_are_kept_too() -> None:
    """Else a client could have the same endless check made again and again."""
    one = checker(grammar_timeout_s=1.0)
    texts: list[str] = []
    for wanted in (ENDLESS, StructuredOutputs(regex="")):
        with pytest.raises(InvalidArgumentError) as caught:
            one.check(wanted)
        texts.append(str(caught.value))
        assert one.knows(wanted)
    one.close()  # from now on nothing is checked
    for wanted, text in zip((ENDLESS, StructuredOutputs(regex="")), texts, strict=True):
        with pytest.raises(InvalidArgumentError) as caught:
            one.check(wanted)
        assert str(caught.value) == text


def test_a_check_that_takes_long_holds_up_no_other() -> None:
    one = checker(grammar_timeout_s=30.0)
    one.check(StructuredOutputs(regex="a"))
    with ThreadPoolExecutor(1) as pool:
        endless = pool.submit(one.check, ENDLESS)
        assert one.check(StructuredOutputs(regex="b"))
        assert not endless.done()
        one.close()
        with pytest.raises(UnavailableError):
            endless.result()


def test_a_process_that_has_died_is_replaced() -> None:
    one = checker()
    one.check(StructuredOutputs(regex="a"))
    first = process_of(one)
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    assert one.check(StructuredOutputs(regex="b"))
    last = process_of(one)
    one.close()
    assert last.poll() is not None


class Slow:
    """Compiles once it may."""

    def __init__(self) -> None:
        self.may = threading.Event()
        self.compiled: list[str] = []

    def __call__(self, text: str) -> FakeGrammar:
        assert self.may.wait(60)
        self.compiled.append(text)
        if text == "bad":
            raise InvalidArgumentError("structured_outputs: bad")
        return FakeGrammar(text)


def submit(key: int, grammar: str = "") -> Submit:
    params = SamplingParams(max_tokens=9, seed=key)
    return Submit(key=key, prompt=[1, 2, 3], params=params, arrival=0.0, grammar=grammar)


def make_engine(**options: object) -> tuple[Engine, Slow]:
    compile_grammar = Slow()
    config = make_config({"model": "m", "block_size": 4, **options})
    return Engine(
        config, FakeRunner(), lambda: 0.0, compile_grammar=compile_grammar
    ), compile_grammar


def drain(engine: Engine) -> dict[int, list]:
    events: dict[int, list] = {}
    while engine.has_work:
        report = engine.step()
        for event in report.events if report is not None else ():
            events.setdefault(event.key, []).append(event)
    return events


def test_others_go_on_while_a_grammar_is_compiled() -> None:
    engine, slow = make_engine(grammar_cache=2)
    for message in (submit(0, "0,2:4"), submit(1), submit(2, "bad"), submit(3, "0,2:4"), Cancel(3)):
        engine.send(message)
    seen = []
    while not any(isinstance(event, Finished) for event in seen):
        seen += engine.step().events
    assert {event.key for event in seen} == {1, 3}
    assert Cancelled(3) in seen, "a cancel waits for nobody"
    assert engine.has_work
    slow.may.set()
    events = drain(engine)
    made = [token for event in events[0] if isinstance(event, Tokens) for token in event.ids]
    assert made == solo_stream(submit(0, "0,2:4"))
    assert len(made) == 4
    assert events[2] == [Failed(2, "INVALID_ARGUMENT", "structured_outputs: bad")]
    assert slow.compiled == ["0,2:4", "bad"]


def test_compiled_grammars_are_kept_and_bounded() -> None:
    engine, slow = make_engine(grammar_cache=2)
    slow.may.set()
    for key, text in enumerate(["1:1", "2:1", "1:1", "3:1", "1:1", "2:1"]):
        engine.send(submit(key, text))
        drain(engine)
    assert slow.compiled == ["1:1", "2:1", "3:1", "2:1"]


def test_an_engine_that_stops_ends_what_waits() -> None:
    engine, slow = make_engine()
    reports: list = []
    engine.send(submit(0, "1:1"))
    engine.stop()
    engine.run(type("Outbox", (), {"put": lambda _, report: reports.append(report)})())
    slow.may.set()
    assert [type(event) for report in reports for event in report.events] == [Failed]


def checker_of(program: str, folder: Path, patch: pytest.MonkeyPatch, setup: bytes = b"\n"):
    """A checker whose process runs this program."""
    (folder / "odd_checker.py").write_text(program, encoding="utf-8")
    patch.syspath_prepend(folder)
    config = make_config({"model": "m", "grammar_timeout_s": 1.0})
    return GrammarChecker(config, "odd_checker", setup)


def test_a_process_that_reads_nothing_holds_up_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_check, "_START_S", 1.0)
    program = "import time\ntime.sleep(60)\n"
    one = checker_of(program, tmp_path, monkeypatch, setup=b"x" * 1_000_000 + b"\n")
    began = time.monotonic()
    with pytest.raises(InternalError, match="does not start"):
        one.check(StructuredOutputs(regex="a"))
    assert time.monotonic() - began < 20
    one.close()


def test_an_answer_that_comes_in_drops_does_not_prolong_its_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = """
import sys, time
print(flush=True)
for _ in range(200):
    time.sleep(0.2)
    print(end="x", flush=True)
"""
    one = checker_of(program, tmp_path, monkeypatch)
    with pytest.raises(UnavailableError, match="its check was stopped"):
        one.check(StructuredOutputs(regex="a"))
    assert not one.knows(StructuredOutputs(regex="a"))
    one.close()


def test_a_check_that_is_killed_from_outside_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That says nothing about the grammar. Each time the first process is killed in its check."""
    program = f"""
import os, pathlib, signal, sys
print(flush=True)
sys.stdin.readline()
seen = pathlib.Path({str(tmp_path / "seen")!r})
if not seen.exists():
    seen.touch()
    os.kill(os.getpid(), signal.SIGKILL)
print('{{"grammar": "fine"}}', flush=True)
"""
    one = checker_of(program, tmp_path, monkeypatch, setup=b"")
    assert one.check(StructuredOutputs(regex="a")) == "fine"
    one.close()


def test_a_check_that_ends_its_process_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = "import os, sys\nprint(flush=True)\nsys.stdin.readline()\nos.abort()\n"
    one = checker_of(program, tmp_path, monkeypatch, setup=b"")
    for _ in range(2):
        with pytest.raises(InvalidArgumentError, match="too complex"):
            one.check(StructuredOutputs(regex="a"))
    one.close()


def test_a_grammar_that_several_threads_ask_for_is_checked_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Each answer is its number, from 0 for the first line.
    program = """
import sys
for number, _ in enumerate(sys.stdin):
    print(f'{{"grammar": "{number}"}}', flush=True)
"""
    one = checker_of(program, tmp_path, monkeypatch)
    # All threads ask before the first answer comes, because the process has to start first.
    with ThreadPoolExecutor(4) as pool:
        grammars = list(pool.map(one.check, [StructuredOutputs(regex="a")] * 4))
    assert grammars == ["1"] * 4
    one.close()


def test_a_closed_checker_starts_no_process() -> None:
    one = checker()
    one.close()
    with pytest.raises(UnavailableError):
        one.check(StructuredOutputs(regex="a"))
    assert [process._process for process in one._processes] == [None] * NUM_PROCESSES
