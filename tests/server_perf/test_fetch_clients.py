"""Environments of the load clients: whole or made again, and never ours. No network is needed."""

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
    """venv and pip that do nothing but bring the commands; returns what was run."""
    ran: list[list[str]] = []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        ran.append(command)
        if "venv" in command:
            (Path(command[-1]) / "bin").mkdir(parents=True, exist_ok=True)
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
