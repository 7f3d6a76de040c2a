"""What is refused before any server is started, with the field, the value and the bound."""

import json
from pathlib import Path

import pytest
from jitney import cli
from jitney.errors import InvalidArgumentError
from jitney_measure import tuner
from typer.testing import CliRunner

from tests.measure.models import CONFIG, write_config


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    write_config(tmp_path, "cheap", CONFIG)
    write_config(tmp_path, "two", CONFIG.replace("count: 1 }", "count: 1 }, { kind: KIND_CPU }"))
    speaking = write_config(tmp_path, "speaking", 'backend: "jitney"')
    (speaking / "1/model.json").write_text(json.dumps({"model": "x"}), encoding="utf-8")
    return tmp_path


@pytest.fixture(autouse=True)
def no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(*_: object) -> None:
        raise AssertionError("a server was started")

    monkeypatch.setattr(tuner, "serve", start)


def error_of(repository: Path, *words: str) -> BaseException | None:
    command = ["tune", *words, "--repository", str(repository), "--out", str(repository / "out")]
    return CliRunner().invoke(cli.make_app(), command).exception


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("cheep",), "model is 'cheep', but must be one of"),
        (("cheap", "--slo", "ttft-p95=20ms"), "on latency: the model makes no tokens"),
        (("cheap", "--slo", "latency-p95=20"), "more than 0 us, ms or s"),
        (("speaking", "--slo", "ttft=1s"), "like ttft-p95=200ms"),
        (("cheap", "--batch-sizes", "4,17"), "'4,17', but must be whole numbers from 1 to 16, max"),
        (("cheap", "--windows", "5"), "windows is '5'"),
        (("cheap", "--instances", "0"), "instances is '0', but must be whole numbers from 1"),
        (("cheap", "--max-num-seqs", "4"), "max_num_seqs is '4', but must be left out"),
        (("speaking", "--windows", "0"), "windows is '0', but must be left out"),
        (("speaking", "--token-budgets", "x"), "token_budgets is 'x'"),
        (("speaking", "--protocol", "http"), "protocol is 'http'"),
        (("two", "--instances", "2"), "two has several instance groups"),
        (("cheap", "--budget", "10"), "like 90s, 10m or 1h"),
        (("cheap", "--budget", "30d"), "like 90s, 10m or 1h"),
        (("cheap", "--budget", "200h"), "a time above 0 and up to 168h"),
        (("cheap", "--beside", "cheap"), "beside is 'cheap', but must be a model other than"),
        (("cheap", "--beside", "too"), "did you mean 'two'"),
        (("cheap", "--concurrency", "1", "--rate", "2"), "left out where --concurrency is given"),
        (("cheap", "--rows", "17"), "rows is 17, but must be at most 16, max_batch_size"),
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
