"""How a program is started with arguments that stand on no command line."""

import logging
import subprocess
import sys
from pathlib import Path

import pytest
from jitney.server import launch as module
from jitney.server.launch import launch

PROGRAM = "import sys; print(*sys.argv[1:], flush=True); sys.stdin.read()"
COMMAND = [sys.executable, "-c", PROGRAM, "--plain=1"]
SECRET = ["--key=3f9a", "--other=77aa"]


def start(environment: dict[str, str]) -> tuple[str, str]:
    """What the program got, and what its command line shows while it runs."""
    with launch(
        COMMAND, SECRET, environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        got = process.stdout.readline().decode()
        shown = Path(f"/proc/{process.pid}/cmdline").read_text(encoding="utf-8")
        process.stdin.close()
        assert process.wait(60) == 0
    return got, shown


def test_the_program_gets_what_its_command_line_does_not_show(
    caplog: pytest.LogCaptureFixture,
) -> None:
    got, shown = start({"JITNEY_ARGUMENT": "another", "EMPTY": ""})
    assert got == "--plain=1 --key=3f9a --other=77aa\n"
    if "visible to every local user" in caplog.text:
        pytest.skip("this system does not allow to look into a child")
    assert "--plain=1" in shown
    assert "3f9a" not in shown
    assert "77aa" not in shown


@pytest.mark.parametrize("how", ["not traced", "memory closed"])
def test_where_that_is_not_allowed_it_is_started_all_the_same(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    def fail(*_: object) -> None:
        raise PermissionError

    if how == "not traced":
        monkeypatch.setattr(module, "_TRACED", "import os; os._exit(99)")
    else:
        monkeypatch.setattr(module, "_redirect", fail)
    with caplog.at_level(logging.WARNING):
        got, shown = start({})
    assert got == "--plain=1 --key=3f9a --other=77aa\n"
    assert "3f9a" in shown
    assert "visible to every local user" in caplog.text
