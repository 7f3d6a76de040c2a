"""Deliberate faults, each in a copy of the package: some of the tests must notice it, and soon."""

import contextlib
import json
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
# What a run does not do takes longer than most tests that notice a fault: to import plugins that
# are installed, to write assertions anew, and to remove the folders of earlier runs.
OPTIONS = ["-x", "-m", "not slow", "-p", "no:cacheprovider", "--assert=plain"]
# With the second one tests/conftest.py does not import torch.
VARIABLES = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "TRITON_INTERPRET": "1"}
# The copy comes before the installed package, which an editable installation finds by itself. Some
# faults make a test wait for what never comes: after a minute that is a failure, too. A thread
# that goes on waiting must not keep the process.
TESTS = """
import os, signal, sys
import pytest

class Bound:
    def stop(self, number, frame):
        raise TimeoutError("this test has waited for a minute")

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_call(self):
        signal.signal(signal.SIGALRM, self.stop)
        signal.alarm(60)
        yield
        signal.alarm(0)

def run(folder, options):
    sys.meta_path[:] = [each for each in sys.meta_path if "editables" not in str(each)]
    sys.path.insert(0, folder)
    import jitney
    assert jitney.__file__.startswith(folder)
    status = pytest.main(options, plugins=[Bound()])
    sys.stdout.flush()
    os._exit(status)
"""
PROGRAM = f"{TESTS}\nrun(sys.argv[1], sys.argv[2:])"
# Imports take longer than most tests that notice a fault. This process makes them once, and forks
# for each line of its input.
FORKING = f"""{TESTS}
import importlib, json
for name in sys.argv[1:]:
    importlib.import_module(name)
for line in sys.stdin:
    folder, options = json.loads(line)
    child = os.fork()
    if not child:
        os.setsid()
        signal.alarm(600)
        out = os.open(folder + "/printed", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(out, 1)
        os.dup2(out, 2)
        run(folder, options)
    _, status, used = os.wait4(child, 0)
    try:
        os.killpg(child, signal.SIGKILL)
    except ProcessLookupError:
        pass
    print(json.dumps([os.waitstatus_to_exitcode(status), used.ru_utime]), flush=True)
"""


class Forks:
    """Runs the tests of faults in forks of one process, which has imported what they need."""

    def __init__(self, *imports: str) -> None:
        """``imports``: modules outside of the package."""
        self._process = subprocess.Popen(
            [sys.executable, "-c", FORKING, *imports],
            cwd=ROOT,
            env={**os.environ, **VARIABLES},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def run(self, folder: Path, options: list[str]) -> tuple[int, str, float]:
        """Run pytest with the package in ``folder``. Returns its exit status, what it printed, and
        its CPU seconds."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([str(folder), options]) + "\n")
        self._process.stdin.flush()
        status, seconds = json.loads(self._process.stdout.readline())
        printed = (folder / "printed").read_text(encoding="utf-8", errors="replace")
        return status, printed, seconds

    def close(self) -> None:
        """End the process."""
        self._process.communicate()


def make_fault(text: str, file: str, changes: Sequence[str]) -> str:
    """The text of a module with a fault. ``changes``: what is written there, what is written in its
    place, and so on."""
    for old, new in zip(changes[::2], changes[1::2], strict=True):
        assert text.count(old) == 1, f"{file} has changed: write {old!r} anew"
        text = text.replace(old, new)
    return text


def assert_noticed(
    folder: Path,
    file: str,
    changes: Sequence[str],
    runs: Sequence[Sequence[str]],
    forks: Forks | None = None,
) -> None:
    """Make a fault in ``file`` of the package, in a copy below ``folder``. One of the ``runs``,
    which are lists of test files below ``tests``, must fail, within MOST_SECONDS of computing.
    They run in ``forks``, or in a process of their own each."""
    # With its bytecode, but not what another process is writing of it.
    ignored = shutil.ignore_patterns("*.pyc.*")
    shutil.copytree(PACKAGE, folder / "jitney", ignore=ignored)
    path = folder / "jitney" / file
    path.write_text(make_fault(path.read_text(encoding="utf-8"), file, changes), encoding="utf-8")
    total = 0.0
    for files in runs:
        options = [*OPTIONS, f"--basetemp={folder}/pytest"]
        options += [f"tests/{name}" for name in files]
        if forks is None:
            status, output, seconds = _run(folder, options)
        else:
            status, output, seconds = forks.run(folder, options)
        total += seconds
        if status:
            break
    assert status == 1, output
    # A fixture that fails is an error to pytest. So is a file that cannot be imported, but then its
    # status is 2.
    assert "failed" in output or "error" in output
    assert total < MOST_SECONDS


def _run(folder: Path, options: list[str]) -> tuple[int, str, float]:
    """Run pytest to its end, with the package in ``folder``; returns its exit status, what it
    printed, and its CPU seconds. Processes that it leaves behind are killed."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    printed = folder / "printed"
    with printed.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(folder), *options],
            cwd=ROOT,
            env={**os.environ, **VARIABLES},
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
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    output = printed.read_text(encoding="utf-8", errors="replace")
    return status, output, after.ru_utime - before.ru_utime
