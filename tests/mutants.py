"""Deliberate faults, each in a copy of the package: some of the tests must notice it, and soon."""

import contextlib
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "backend/jitney/jitney"
MOST_SECONDS = 90
# The copy comes before the installed package, which an editable installation finds by itself. Some
# faults make a test wait for what never comes: after a minute that is a failure, too. A thread
# that goes on waiting must not keep the process.
PROGRAM = """
import os, signal, sys
sys.meta_path[:] = [each for each in sys.meta_path if "editables" not in str(each)]
sys.path.insert(0, sys.argv[1])
import jitney, pytest
assert jitney.__file__.startswith(sys.argv[1])

class Bound:
    def stop(self, number, frame):
        raise TimeoutError("this test has waited for a minute")

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_call(self):
        signal.signal(signal.SIGALRM, self.stop)
        signal.alarm(60)
        yield
        signal.alarm(0)

status = pytest.main(sys.argv[2:], plugins=[Bound()])
sys.stdout.flush()
os._exit(status)
"""


def make_fault(text: str, file: str, changes: Sequence[str]) -> str:
    """The text of a module with a fault. ``changes``: what is written there, what is written in its
    place, and so on."""
    for old, new in zip(changes[::2], changes[1::2], strict=True):
        assert text.count(old) == 1, f"{file} has changed: write {old!r} anew"
        text = text.replace(old, new)
    return text


def assert_noticed(
    folder: Path, file: str, changes: Sequence[str], runs: Sequence[Sequence[str]]
) -> None:
    """Make a fault in ``file`` of the package, in a copy below ``folder``. One of the ``runs``,
    which are lists of test files below ``tests``, must fail, within MOST_SECONDS of computing."""
    # With its bytecode, but not what another process is writing of it.
    ignored = shutil.ignore_patterns("*.pyc.*")
    shutil.copytree(PACKAGE, folder / "jitney", ignore=ignored)
    path = folder / "jitney" / file
    path.write_text(make_fault(path.read_text(encoding="utf-8"), file, changes), encoding="utf-8")
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    for files in runs:
        options = ["-x", "-m", "not slow", "-p", "no:cacheprovider", "-p", "no:xdist"]
        options += [f"tests/{name}" for name in files]
        status, output = _run([sys.executable, "-c", PROGRAM, str(folder), *options], folder)
        if status:
            break
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert status == 1, output
    assert "failed" in output
    assert after.ru_utime - before.ru_utime < MOST_SECONDS


def _run(command: list[str], folder: Path) -> tuple[int, str]:
    """Run a command to its end; returns its exit status and what it printed. Processes that it
    leaves behind are killed."""
    printed = folder / "printed"
    with printed.open("wb") as out:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, "TRITON_INTERPRET": "1"},  # or tests/conftest.py imports torch
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
        try:
            status = process.wait(timeout=600)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return status, printed.read_text(encoding="utf-8", errors="replace")
