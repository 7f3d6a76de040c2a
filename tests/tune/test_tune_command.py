"""What is refused before any server is started, with the field, the value and the bound."""

import importlib.util
import json
import re
import signal
from pathlib import Path

import pytest
from jitney import cli
from jitney.errors import InstallationError, InvalidArgumentError
from jitney.tune import tuner
from jitney.tune.command import _interruptible
from typer.testing import CliRunner

from tests.tune.models import CONFIG, write_config


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    write_config(tmp_path, "cheap", CONFIG)
    free = CONFIG.replace("dims: [4] }]\noutput", "dims: [-1] }]\noutput")
    write_config(tmp_path, "free", free)
    write_config(tmp_path, "two", CONFIG.replace("count: 1 }", "count: 1 }, { kind: KIND_CPU }"))
    speaking = write_config(tmp_path, "speaking", 'backend: "jitney"')
    (speaking / "1/model.json").write_text(json.dumps({"model": "x"}), encoding="utf-8")
    return tmp_path


@pytest.fixture(autouse=True)
def no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(*_: object) -> None:
        raise AssertionError("a server was started")

    monkeypatch.setattr(tuner, "Session", start)


def error_of(repository: Path, *words: str) -> BaseException | None:
    command = ["tune", *words, "--repository", str(repository), "--out", str(repository / "out")]
    return CliRunner().invoke(cli.app, command).exception


def test_help_is_worth_reading() -> None:
    output = CliRunner(env={"COLUMNS": "200"}).invoke(cli.app, ["tune", "--help"]).output
    plain = re.sub(r"\x1b\[[0-9;]*m", "", output)
    assert all(word in plain for word in ("--slo", "--windows", "--budget", "config.pbtxt"))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("cheep",), "model is 'cheep', but must be one of"),
        (("cheap", "--slo", "ttft-p95=20ms"), "on latency: the model makes no tokens"),
        (("cheap", "--slo", "latency-p95=20"), "unit us, ms or s"),
        (("speaking", "--slo", "ttft=1s"), "like ttft-p95=200ms"),
        (("cheap", "--batch-sizes", "4,17"), "'4,17', but must be whole numbers from 1 to 16, max"),
        (("cheap", "--windows", "5"), "windows is '5'"),
        (("cheap", "--instances", "0"), "instances is '0', but must be whole numbers from 1"),
        (("cheap", "--max-num-seqs", "4"), "max_num_seqs is '4', but must be left out"),
        (("speaking", "--windows", "0"), "windows is '0', but must be left out"),
        (("speaking", "--token-budgets", "x"), "token_budgets is 'x'"),
        (("speaking", "--protocol", "http"), "protocol is 'http'"),
        (("two", "--instances", "2"), "two has 2 instance groups"),
        (("cheap", "--budget", "10"), "like 90s, 10m or 1h"),
        (("cheap", "--budget", "3s"), "budget is '3s', but must be at least"),
        (("cheap", "--concurrency", "1", "--rate", "2"), "left out where --concurrency is given"),
        (("cheap", "--concurrency", "x"), "whole numbers from 1"),
        (("cheap", "--rows", "17"), "rows is 17, but must be at most 16, max_batch_size"),
        (("free",), "say how large with --shape x:1"),
        (("cheap", "--data", "/nowhere"), "cannot read /nowhere: No such file"),
        (("cheap", "--arrivals", "even"), "poisson or constant"),
        (("speaking", "--sampling", "[]"), "a JSON object"),
        (("cheap", "--data", __file__), "is not a JSON object with a list 'data'"),
        (("cheap", "--slo", ","), "slo is ',', but must be like latency-p99=20ms"),
        (
            ("cheap", "--slo", "latency-p99=0ms"),
            "slo is 'latency-p99=0ms', but must be more than 0",
        ),
        (("cheap", "--prompts", __file__), "left out: cheap is no language model"),
        (
            ("speaking", "--shape", "x:4"),
            "shape is 'x:4', but must be left out: speaking is a lang",
        ),
    ],
)
def test_mistakes_are_named_first(repository: Path, words: tuple[str, ...], said: str) -> None:
    error = error_of(repository, *words)
    assert isinstance(error, InvalidArgumentError), error
    assert said in str(error)
    assert not (repository / "out").exists()


def test_a_folder_that_cannot_be_written_to_is_said_first(repository: Path) -> None:
    (repository / "out").write_text("a file", encoding="utf-8")
    error = error_of(repository, "cheap")
    assert isinstance(error, InvalidArgumentError), error
    assert "must be a folder that can be written to: File exists" in str(error)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_that_end_a_run(number: signal.Signals) -> None:
    """As Ctrl-C does, so that the server is ended and the rest reported; nohup stays nohup."""
    before = signal.signal(number, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt), _interruptible():
            signal.raise_signal(number)
        assert signal.getsignal(number) is signal.default_int_handler
        signal.signal(number, signal.SIG_IGN)
        with _interruptible():
            signal.raise_signal(number)
    finally:
        signal.signal(number, before)


def test_without_matplotlib_it_is_said_first(
    monkeypatch: pytest.MonkeyPatch, repository: Path
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    error = error_of(repository, "cheap")
    assert isinstance(error, InstallationError)
    assert "triton-jitney[bench]" in str(error)
