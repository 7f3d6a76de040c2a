"""Environments of clients: whole or made again, and never ours. No network is needed."""

import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def fetching(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script, in an environment that is an empty folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "scripts"))
        import fetch_clients
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    return fetch_clients


def pretend(monkeypatch: pytest.MonkeyPatch, script: ModuleType, status: int) -> list[list[str]]:
    """venv, pip and npm that do nothing but bring the commands; returns what was run."""
    ran: list[list[str]] = []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        ran.append(command)
        if "venv" in command:
            (Path(command[-1]) / "bin").mkdir(parents=True, exist_ok=True)
            (Path(command[-1]) / "bin/python").touch()
        elif command[0] == "npm":
            (Path(command[-2]) / "bin").mkdir(parents=True)
            (Path(command[-2]) / "bin/codex").touch()
        elif status == 0:
            client = command[-1].partition("==")[0]
            (Path(command[0]).parent / client).touch()
        failed = status if "pip" in command else 0
        return subprocess.CompletedProcess(command, failed, "", "first\nERROR: no such version\n")

    monkeypatch.setattr(script.subprocess, "run", run)
    return ran


def test_a_whole_environment_is_kept_and_another_version_is_not(
    fetching: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = pretend(monkeypatch, fetching, 0)
    assert fetching.fetch("aiperf") == tmp_path / "aiperf/bin/aiperf"
    assert [command[-1] for command in ran] == [
        str(tmp_path / "aiperf"), fetching.REQUIREMENTS["aiperf"]
    ]  # fmt: skip
    assert ran[1][0] == str(tmp_path / "aiperf/bin/python"), "its own pip, not ours"
    fetching.fetch("aiperf")
    assert len(ran) == 2
    monkeypatch.setitem(fetching.REQUIREMENTS, "aiperf", "aiperf==99")
    fetching.fetch("aiperf")
    assert "--clear" in ran[2]
    assert ran[3][-1] == "aiperf==99"


def test_a_broken_fetch_is_an_error_of_one_line_and_made_again(
    fetching: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pretend(monkeypatch, fetching, 1)
    monkeypatch.setattr(sys, "argv", ["fetch_clients.py", "aiperf"])
    assert fetching.main() == 1
    requirement = fetching.REQUIREMENTS["aiperf"]
    assert capsys.readouterr().err == f"error: {requirement}: ERROR: no such version\n"
    ran = pretend(monkeypatch, fetching, 0)
    assert fetching.main() == 0
    assert len(ran) == 2


def test_a_library_has_its_python_and_may_be_of_several_packages(
    fetching: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = pretend(monkeypatch, fetching, 0)
    assert fetching.fetch("llama-index") == tmp_path / "llama-index/bin/python"
    assert ran[1][-2:] == fetching.REQUIREMENTS["llama-index"].split()


def test_a_client_of_npm_is_installed_into_its_folder(
    fetching: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = pretend(monkeypatch, fetching, 0)
    assert fetching.fetch("codex") == tmp_path / "codex/bin/codex"
    assert [command[-2:] for command in ran] == [
        [str(tmp_path / "codex"), fetching.REQUIREMENTS["codex"]]
    ]
    fetching.fetch("codex")
    assert len(ran) == 1
    monkeypatch.setitem(fetching.REQUIREMENTS, "codex", "@openai/codex@99")
    fetching.fetch("codex")
    assert len(ran) == 2, "the folder of the other version was in the way"


def test_all_are_fetched_though_one_fails(
    fetching: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fetch(client: str) -> Path:
        if client == "litellm":
            raise fetching.FetchError("no network")
        return Path("/env") / client / "bin" / client

    monkeypatch.setattr(fetching, "fetch", fetch)
    monkeypatch.setattr(sys, "argv", ["fetch_clients.py", "all"])
    assert fetching.main() == 1
    printed = capsys.readouterr()
    assert len(printed.out.splitlines()) == len(fetching.REQUIREMENTS) - 1
    assert printed.err == "error: no network\n"


def test_what_is_not_there_is_said_with_the_command_that_fetches_it(
    fetching: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, fetching, 0)
    with pytest.raises(fetching.FetchError, match=r"python scripts/fetch_clients\.py llm"):
        fetching.find("llm")
    fetching.fetch("llm")
    assert fetching.find("llm").name == "llm"


def test_genai_perf_finds_perf_analyzer_beside_it(
    fetching: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "a folder"
    folder.mkdir()
    binary = folder / "perf_analyzer"
    binary.write_text('#!/bin/sh\necho "$LD_LIBRARY_PATH" "$@"\n', encoding="utf-8")
    binary.chmod(0o755)
    monkeypatch.setattr(fetching.fetch_perf_analyzer, "fetch", lambda: binary)
    with monkeypatch.context() as patch:
        pretend(patch, fetching, 0)
        command = fetching.fetch("genai-perf")
    started = subprocess.run(
        [command.parent / "perf_analyzer", "-m", "two words"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert started.stdout == f"{folder} -m two words\n"
