"""Deliberate faults, each in a copy of the package: some of the tests must notice it, and soon."""

import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "backend/jitney/jitney"
MOST_SECONDS = 90
# The copy comes before the installed package, which an editable installation finds by itself.
PROGRAM = """
import sys
sys.meta_path[:] = [each for each in sys.meta_path if "editables" not in str(each)]
sys.path.insert(0, sys.argv[1])
import jitney, pytest
assert jitney.__file__.startswith(sys.argv[1])
sys.exit(pytest.main(sys.argv[2:]))
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
        result = subprocess.run(
            [sys.executable, "-c", PROGRAM, str(folder), *options],
            cwd=ROOT,
            env={**os.environ, "TRITON_INTERPRET": "1"},  # or tests/conftest.py imports torch
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        if result.returncode:
            break
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert result.returncode == 1, result.stdout + result.stderr
    assert "failed" in result.stdout
    assert after.ru_utime - before.ru_utime < MOST_SECONDS
