"""The `jitney` command itself, and `jitney generate`. Neighbours test the commands they add."""

from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

import pytest
from jitney import __version__, cli
from jitney.errors import InvalidArgumentError
from typer.testing import CliRunner, Result


def invoke(words: list[str], **options: Any) -> Result:
    return CliRunner().invoke(cli.make_app(), words, **options)


def test_version() -> None:
    assert invoke(["--version"]).output.strip() == f"jitney {__version__}"


def test_commands_that_cannot_be_imported_are_named_and_break_no_other(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "raises_when_imported.py").write_text("raise RuntimeError('[no] way x[a:b:2]')")
    monkeypatch.syspath_prepend(tmp_path)
    broken = [
        EntryPoint("zoo", "no_such_package.zoo:main", cli.COMMANDS),
        EntryPoint("bad", "raises_when_imported:main", cli.COMMANDS),
    ]
    installed = [*entry_points(group=cli.COMMANDS), *broken]
    monkeypatch.setattr(cli, "entry_points", lambda group: installed)
    result = invoke(["--help"])
    assert result.exit_code == 0
    assert "generate" in result.output
    warnings = capsys.readouterr().err
    assert "the command zoo (no_such_package.zoo:main) is left out: ModuleNotFoundError" in warnings
    assert "(raises_when_imported:main) is left out: RuntimeError: [no] way x[a:b:2]" in warnings


def test_generate_without_a_model_outside_of_a_checkout(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("jitney.generate.__file__", str(tmp_path / "a/b/c/generate.py"))
    result = invoke(["generate", "x"])
    assert isinstance(result.exception, InvalidArgumentError)
    assert "--model" in str(result.exception)


def test_generate_streams_the_demo_model() -> None:
    prompt = "def add(a, b):"
    words = ["generate", "-", "--max-tokens=12", "--threads=1"]
    result = invoke(words, input=prompt)
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith(prompt)
    assert len(result.stdout.strip()) > len(prompt) + 10
    assert "Loading weights" not in result.stderr, "no library writes to our terminal"
    refused = CliRunner().invoke(
        cli.make_app(), ["generate", "x", "--threads=1", "--temperature=-1"]
    )
    assert isinstance(refused.exception, InvalidArgumentError)
    assert "temperature is -1.0, but must be" in str(refused.exception)
