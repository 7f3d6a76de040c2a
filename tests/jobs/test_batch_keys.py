"""The API keys with which the jobs of batches come back to the gateway."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from jitney_gateway.keys import FileKeys
from jitney_jobs.batches import records
from jitney_jobs.batches.records import Folder, write_private
from jitney_jobs.batches.service import BatchService

OLD = "o" * 24
NEW = "n" * 24


def write(file: Path, text: str) -> None:
    """In place, at another time than before."""
    at = file.stat().st_mtime_ns + 1_000_000 if file.exists() else 0
    file.write_text(text, encoding="utf-8")
    os.utime(file, ns=(at, at))


def test_keys_of_jobs_last_and_come_with_new_owners(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "batches")
    file = tmp_path / "keys"
    write(file, f"alice:{OLD}\n")
    before = dict(FileKeys(file, [BatchService(folder)]).refreshed_owners())
    assert sorted(before.values()) == ["alice", "alice"]
    keys = FileKeys(file, [BatchService(folder)])
    assert dict(keys.refreshed_owners()) == before
    write(file, f"alice:{OLD}\nbob:{NEW}\n")
    after = dict(keys.refreshed_owners())
    assert sorted(after.values()) == ["alice", "alice", "bob", "bob"]
    assert before.items() <= after.items()
    assert folder.key_file("bob").stat().st_mode & 0o077 == 0


def test_a_full_disk_keeps_no_key_that_is_taken_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Folder(tmp_path / "batches")
    file = tmp_path / "keys"
    write(file, f"alice:{OLD}\n")
    keys = FileKeys(file, [BatchService(folder)])

    def full(path: Path, pieces: list[bytes]) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(records, "write_private", full)
        write(file, f"bob:{NEW}\n")
        assert dict(keys.refreshed_owners()) == {NEW: "bob"}
    assert sorted(dict(keys.refreshed_owners()).values()) == ["bob", "bob"]


def test_gateways_that_start_at_once_agree_on_the_keys_of_jobs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each writes its own before either has it in place."""
    folder = Folder(tmp_path / "batches")
    file = tmp_path / "keys"
    write(file, f"alice:{OLD}\n")
    both = threading.Barrier(2)

    def together(path: Path, pieces: list[bytes]) -> None:
        write_private(path, pieces)
        both.wait(60)

    monkeypatch.setattr(records, "write_private", together)
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(
            lambda _: dict(FileKeys(file, [BatchService(folder)]).refreshed_owners()), range(2)
        )
    assert first == second
    assert [path.name for path in folder.keys.iterdir()] == ["alice.key"]
