"""The table of engines under comparison, and the workloads on a model of another vocabulary."""

import json
import sys
from argparse import Namespace
from pathlib import Path

import pytest

from benchmarks import engine
from benchmarks.engines.measure import Outcome, Starts, figure
from benchmarks.workloads import WORKLOADS, Workload, bounds_of, w1, w7


def arguments(**changes: object) -> Namespace:
    """What the command line gives by default, with every engine's environment this one."""
    values: dict[str, object] = {
        "model": "m100", "workloads": ["W1", "W2", "W3"], "repeats": 3, "requests": None,
        "instructions": "all", "breakdown": False, "openvino_python": sys.executable,
        "llamacpp_python": sys.executable, "vllm_python": sys.executable,
    }  # fmt: skip
    return Namespace(**values | changes)


def checkpoint(folder: Path, vocab_size: int) -> Path:
    (folder / "config.json").write_text(json.dumps({"vocab_size": vocab_size}))
    return folder


def test_each_engine_has_its_module_and_each_ratio_its_engines() -> None:
    folder = engine.ROOT / "benchmarks" / "engines"
    assert all((folder / f"{each.module}.py").is_file() for each in engine.ENGINES.values())
    named = {name for pair in engine.RATIOS for name in pair} | set(engine.DEFAULT)
    assert named <= set(engine.ENGINES)


def test_an_engine_that_is_not_installed_is_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    model = checkpoint(tmp_path, 32000)
    assert engine._command("llamacpp_q4", model, arguments()) is None
    assert "without llama.cpp, Q4_0: llama_cpp is not installed" in capsys.readouterr().out


def test_m500_is_fed_with_its_own_vocabulary(tmp_path: Path) -> None:
    command = engine._command(
        "jitney_int4", checkpoint(tmp_path, 151_936), arguments(model="m500", requests=8)
    )
    assert command is not None
    assert command.options == ["--quantization", "int4", "--vocab-size", "151936"]
    assert command.requests == 8


def test_m500_takes_fewer_requests_with_avx2(tmp_path: Path) -> None:
    """All of W1 would take more than three minutes there."""
    model = checkpoint(tmp_path, 151_936)
    command = engine._command("jitney", model, arguments(model="m500", instructions="avx2"))
    assert command is not None
    assert command.requests == engine.M500_AVX2_REQUESTS


def test_a_larger_vocabulary_changes_the_ids_and_not_the_lengths() -> None:
    small, large = w1(), w1(151_936)
    assert small.output_lengths == large.output_lengths
    assert [len(p) for p in small.prompts] == [len(p) for p in large.prompts]
    assert max(map(max, small.prompts)) < 32000 < max(map(max, large.prompts))


def test_ratios_are_of_medians(capsys: pytest.CaptureFixture) -> None:
    def runs(*figures: float) -> list[dict]:
        return [{"workloads": {"W2": {"figure": figure}}} for figure in figures]

    results = {"jitney_int4": runs(90, 10, 100), "llamacpp_q4": runs(50, 60, 1000), "jitney": []}
    engine._print_ratios(results, ["W1", "W2"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "| Jitney, int4 weights ÷ llama.cpp, Q4_0 | – | 1.50 |"
    assert len(lines) == 4  # an empty line, the head and one row


def test_an_engine_that_fails_takes_no_result_along(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    def run(command: engine.Command, threads: int) -> dict:
        if command.name == "jitney_int8":
            raise RuntimeError("it is broken")
        return {"workloads": {"W1": {"figure": 7.0}}, "peak_mb": 1, "load_s": 1}

    model, found = checkpoint(tmp_path, 32000), tmp_path / "found.json"
    more = {"engines": ["jitney_int8", "jitney"], "workloads": ["W1"], "threads": 2, "repeats": 2}
    given = arguments(work_dir=tmp_path, json=found, **more)
    monkeypatch.setattr(engine, "_parse", lambda: given)
    monkeypatch.setitem(engine.MODELS, "m100", lambda folder: model)
    monkeypatch.setattr(engine.Command, "run", run)
    with pytest.raises(SystemExit, match="failed, at least once: jitney_int8"):
        engine.main()
    printed = capsys.readouterr()
    assert "it is broken" in printed.err
    assert "| Jitney | 7.0 (1.00)" in printed.out
    assert len(json.loads(found.read_text())["jitney"]) == 2


def test_decodes_count_from_the_last_requests_first_token() -> None:
    workload = Workload("four", [[1]] * 2, [5, 5], "decode")
    starts = Starts(2)
    starts.note([0], tokens=1, seconds=1.0)
    starts.note([0, 1], tokens=3, seconds=2.0)
    starts.note([0, 1], tokens=5, seconds=3.0)
    outcome = Outcome(
        seconds=9.0,
        output_tokens=10,
        first_token_s=1.0,
        all_started_s=starts.all_started_s,
        tokens_then=starts.tokens_then,
    )
    assert figure(workload, outcome) == (10 - 3) / (9.0 - 2.0)


def test_the_shared_prefix_is_asked_before() -> None:
    workload = w7()
    before = workload.before()
    assert before is not None
    (prefix,) = before.prompts
    assert len(prefix) == 2048
    assert all(prompt[:2048] == prefix and len(prompt) == 2080 for prompt in workload.prompts)
    assert len({tuple(prompt) for prompt in workload.prompts}) == 64


def test_workloads_of_different_bounds_run_in_processes_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def run_process(command: engine.Command, workloads: list[str], threads: int) -> dict:
        asked.append(workloads)
        figures = {name: {"figure": 1.0} for name in workloads}
        return {"workloads": figures, "peak_mb": len(asked), "load_s": 1.0}

    monkeypatch.setattr(engine.Command, "_run_process", run_process)
    model = checkpoint(tmp_path, 32000)
    given = arguments(model="m100_32k", workloads=["W4", "W5", "W6", "W7"])
    command = engine._command("jitney", model, given)
    assert command is not None
    report = command.run(2)
    assert asked == [["W4", "W5"], ["W6"], ["W7"]]
    assert list(report["workloads"]) == ["W4", "W5", "W6", "W7"]
    assert report["peak_mb"] == 3


def test_a_cache_holds_each_workload() -> None:
    """Of m100, in 16 bits: 12 layers, 4 heads of 64, keys and values."""
    token_bytes = 12 * 4 * 64 * 2 * 2
    for name, make in WORKLOADS.items():
        workload = make()
        bounds = bounds_of(name)
        running = min(len(workload.prompts), bounds.max_num_seqs)
        assert running * workload.max_length * token_bytes <= bounds.cache_gib << 30
