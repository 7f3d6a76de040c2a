"""Runs the blocks of one page in order: variables and the folder are carried from one to the next.

Each block is a process group of its own. Its output goes to a file, so that what it leaves in the
background holds nobody up; `close` ends all of that.
"""

import os
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

from tests.docs.blocks import Block

LIMIT_S = 600.0
_BEFORE = """set -euo pipefail
set -o allexport
source "$JITNEY_DOCS_STATE"
trap 'status=$?; { export -p | grep -vE "^declare -x (JITNEY_DOCS_STATE|_|SHLVL)="; \
printf "cd %q\\n" "$PWD"; } > "$JITNEY_DOCS_STATE"; exit $status' EXIT
"""


class BlockError(AssertionError):
    """A block failed. Says which, how, and what it printed last."""


class PageShell:
    """Of one page, in a scratch copy of the repository."""

    def __init__(self, folder: Path, variables: dict[str, str], state: Path) -> None:
        self.folder = folder
        self._variables = variables
        self._state = state
        self._groups: list[subprocess.Popen[bytes]] = []
        state.mkdir()
        (state / "variables").touch()

    def run(self, block: Block, limit_s: float = LIMIT_S) -> str:
        """Run a block to its end and return what it printed. Raises BlockError."""
        process, output = self._start(block)
        try:
            status: int | str = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            status = f"none after {limit_s:.0f} s"
        text = output.read_text(encoding="utf-8", errors="replace")
        if status != 0:
            raise BlockError(f"{block}: exit status {status}\n{block.text}\n{text[-4000:]}")
        return text

    def serve(self, block: Block) -> tuple[subprocess.Popen[bytes], Path]:
        """Start a block that runs until it is stopped; its process, and where it prints."""
        return self._start(block)

    def _start(self, block: Block) -> tuple[subprocess.Popen[bytes], Path]:
        output = self._state / f"{len(self._groups)}-{block.line}.out"
        command = ["bash", "-c", _BEFORE + block.text]
        if block.language == "python":
            command = ["bash", "-c", _BEFORE + 'python -c "$0"', block.text]
        with output.open("wb") as file:
            process = subprocess.Popen(
                command,
                cwd=self.folder,
                env={**self._variables, "JITNEY_DOCS_STATE": str(self._state / "variables")},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._groups.append(process)
        return process, output

    def close(self) -> None:
        """End whatever the page's blocks left running: asked first, then killed."""
        for number, patience_s in ((signal.SIGTERM, 20.0), (signal.SIGKILL, 5.0)):
            for process in self._groups:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, number)
            deadline = time.monotonic() + patience_s
            while time.monotonic() < deadline and any(map(_is_there, self._groups)):
                time.sleep(0.1)


def _is_there(process: subprocess.Popen[bytes]) -> bool:
    """Whether any process of its group runs."""
    process.poll()
    try:
        os.killpg(process.pid, 0)
    except ProcessLookupError:
        return False
    return True
