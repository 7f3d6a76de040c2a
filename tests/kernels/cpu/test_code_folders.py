"""Folders of compiled kernels that nobody uses go, and those in use stay."""

import fcntl
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from jitney.kernels.cpu import code_folders
from jitney.kernels.cpu.code_folders import NUM_KEPT, UNUSED_S, claim, remove_unused

DAY_S = 24 * 3600.0
_USE = """
import sys
from pathlib import Path
from jitney.kernels.cpu.code_folders import claim
claim(Path(sys.argv[1]))
print("claimed", flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def forget_claims() -> Iterator[None]:
    yield
    claim.cache_clear()


def make(parent: Path, number: int, days_ago: float) -> Path:
    """A folder that was last used so long ago."""
    folder = parent / f"jitney-kernels-{number:016x}"
    folder.mkdir(parents=True)
    (folder / "kernel.nbi").touch()
    (folder / "in-use").touch()
    used_at = time.time() - days_ago * DAY_S
    os.utime(folder / "in-use", (used_at, used_at))
    return folder


def names(parent: Path) -> set[str]:
    return {entry.name for entry in parent.iterdir()}


def test_folders_that_were_not_used_for_weeks_go(tmp_path: Path) -> None:
    own = tmp_path / f"jitney-kernels-{0:016x}"
    kept = [make(tmp_path, 1, 100), make(tmp_path, 2, 101)]
    recent = make(tmp_path, 3, UNUSED_S / DAY_S - 1)
    old = make(tmp_path, 4, 102)
    earlier = tmp_path / f"jitney-kernels-{5:016x}"  # of a version that had no locks
    earlier.mkdir()
    os.utime(earlier, (0, 0))
    interrupted = tmp_path / f"jitney-kernels-{6:016x}.removed"
    interrupted.mkdir()
    others = [tmp_path / "jitney-kernels-1000", tmp_path / "kernel.cpython-311.pyc"]
    for other in others:
        other.mkdir()
        os.utime(other, (0, 0))
    claim(own)
    assert NUM_KEPT == 3, "own, recent and the first of the others"
    left = {folder.name for folder in (own, recent, kept[0], *others)}
    assert names(tmp_path) == left
    assert not old.exists()


def test_a_folder_that_another_process_uses_stays_until_that_ends(tmp_path: Path) -> None:
    used = make(tmp_path, 9, 0)
    with subprocess.Popen(
        [sys.executable, "-c", _USE, str(used)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "claimed\n"
        os.utime(used / "in-use", (0, 0))
        for number in range(NUM_KEPT):
            make(tmp_path, number, 100)
        remove_unused(tmp_path)
        assert (used / "kernel.nbi").exists()
        process.communicate("")
    os.utime(used / "in-use", (0, 0))
    remove_unused(tmp_path)
    assert not used.exists()


def test_a_folder_that_is_removed_while_it_is_claimed_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make(tmp_path, 1, 0)
    real = fcntl.flock
    removals = [folder, folder]

    def flock(file: object, operation: int) -> None:
        if removals:
            shutil.rmtree(removals.pop())
        real(file, operation)  # type: ignore[arg-type]

    monkeypatch.setattr(code_folders.fcntl, "flock", flock)
    file = claim(folder)
    assert removals == []
    assert os.path.samestat(os.fstat(file.fileno()), (folder / "in-use").stat())


def test_without_locks_nothing_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(file: object, operation: int) -> None:
        raise OSError

    monkeypatch.setattr(code_folders.fcntl, "flock", fail)
    folders = [make(tmp_path, number, 100) for number in range(1, 6)]
    claim(tmp_path / f"jitney-kernels-{0:016x}")
    assert all((folder / "kernel.nbi").exists() for folder in folders)


def test_folders_of_others_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = [make(tmp_path, number, 100) for number in range(6)]
    monkeypatch.setattr(os, "getuid", lambda: os.geteuid() + 1)
    remove_unused(tmp_path)
    assert all(folder.exists() for folder in folders)


def test_removing_at_once_hurts_nobody(tmp_path: Path) -> None:
    """Some processes claim and remove the same folders again and again."""
    program = """
import sys, os
from pathlib import Path
from jitney.kernels.cpu import code_folders
code_folders.NUM_KEPT = 0
code_folders.UNUSED_S = -1.0
folder = Path(sys.argv[1])
for turn in range(300):
    file = code_folders.claim.__wrapped__(folder)
    (folder / f"{os.getpid()}").write_text(str(turn))
    assert (folder / f"{os.getpid()}").read_text() == str(turn)
    file.close()
"""
    folder = tmp_path / f"jitney-kernels-{1:016x}"
    command = [sys.executable, "-c", program, str(folder)]
    processes = [subprocess.Popen(command) for _ in range(3)]
    assert [process.wait() for process in processes] == [0, 0, 0]
