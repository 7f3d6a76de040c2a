"""API keys of a gateway: a file that changes, and the keys with which jobs come back."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from jitney.errors import ConfigError
from jitney_gateway import keys as keys_module
from jitney_gateway.app import make_app
from jitney_gateway.batch_records import Folder, write_whole
from jitney_gateway.keys import Keys
from starlette.testclient import TestClient

OLD, NEW = "o" * 24, "n" * 24


def write(file: Path, text: str) -> None:
    """In place, at another time than before."""
    at = file.stat().st_mtime_ns + 1_000_000 if file.exists() else 0
    file.write_text(text, encoding="utf-8")
    os.utime(file, ns=(at, at))


def test_a_key_that_is_taken_away_is_refused_from_then_on(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    write(file, f"# keys\n\nalice:{OLD}\n")
    client = TestClient(make_app(None, Keys(file)))  # type: ignore[arg-type]

    def status(key: str) -> int:
        return client.get("/v1/files", headers={"authorization": f"Bearer {key}"}).status_code

    assert (status(OLD), status(NEW)) == (404, 401)  # it keeps no files
    write(file, f"alice:{NEW}\n")
    assert (status(OLD), status(NEW)) == (401, 404)


@pytest.mark.parametrize("text", ["", "# nobody\n", "alice:short\n", "alice\n"])
def test_keys_stay_while_the_file_cannot_be_used(
    tmp_path: Path, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "keys"
    write(file, text)
    with pytest.raises(ConfigError, match="keys"):
        Keys(file)
    write(file, f"alice:{OLD}\n")
    keys = Keys(file)
    write(file, text)
    assert dict(keys.items()) == {OLD: "alice"}
    assert caplog.text.count("stay as they were") == 1
    assert dict(keys.items()) == {OLD: "alice"}
    assert caplog.text.count("stay as they were") == 1
    file.unlink()
    assert dict(keys.items()) == {OLD: "alice"}
    write(file, f"alice:{NEW}\n")
    assert dict(keys.items()) == {NEW: "alice"}


def test_keys_of_jobs_last_and_come_with_new_owners(tmp_path: Path) -> None:
    folder, file = Folder(tmp_path / "batches"), tmp_path / "keys"
    write(file, f"alice:{OLD}\n")
    before = dict(Keys(file, folder).items())
    assert sorted(before.values()) == ["alice", "alice"]
    keys = Keys(file, folder)
    assert dict(keys.items()) == before
    write(file, f"alice:{OLD}\nbob:{NEW}\n")
    after = dict(keys.items())
    assert sorted(after.values()) == ["alice", "alice", "bob", "bob"]
    assert before.items() <= after.items()
    assert folder.key_file("bob").stat().st_mode & 0o077 == 0


def test_a_full_disk_keeps_no_key_that_is_taken_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, file = Folder(tmp_path / "batches"), tmp_path / "keys"
    write(file, f"alice:{OLD}\n")
    keys = Keys(file, folder)

    def full(path: Path, pieces: list[bytes]) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(keys_module, "write_whole", full)
        write(file, f"bob:{NEW}\n")
        assert dict(keys.items()) == {NEW: "bob"}
    assert sorted(dict(keys.items()).values()) == ["bob", "bob"]


def test_gateways_that_start_at_once_agree_on_the_keys_of_jobs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each writes its own before either has it in place."""
    folder, file = Folder(tmp_path / "batches"), tmp_path / "keys"
    write(file, f"alice:{OLD}\n")
    both = threading.Barrier(2)

    def together(path: Path, pieces: list[bytes]) -> None:
        write_whole(path, pieces)
        both.wait(60)

    monkeypatch.setattr(keys_module, "write_whole", together)
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda _: dict(Keys(file, folder).items()), range(2))
    assert first == second
    assert [path.name for path in folder.keys.iterdir()] == ["alice.key"]


def test_limits_belong_to_an_owner_and_all_his_keys(tmp_path: Path) -> None:
    folder, file = Folder(tmp_path / "batches"), tmp_path / "keys"
    text = f"alice:{OLD}   tiers=bulk  min_priority=0\nbob:{NEW}\n"
    write(file, text)
    keys = Keys(file, folder)
    assert [keys.limits(name) for name in ("alice", "bob")] == ["tiers=bulk min_priority=0", ""]
    for more in (f"alice:{NEW[1:]}x\n", f"bob:{NEW[1:]}x tier=bulk\n"):
        write(file, text + more)
        with pytest.raises(ConfigError, match=r"line 3: .*(other limits|tier=bulk)"):
            Keys(file, folder)
    assert keys.limits("alice") == "tiers=bulk min_priority=0"
    write(file, f"{text}bob:{NEW[1:]}x tiers=bulk,night/day\n")
    with pytest.raises(ConfigError, match=r"line 3: tiers is 'night/day', but must be of letters"):
        Keys(file, folder)
    write(file, f"alice:{OLD}\n")
    keys.items()
    assert keys.limits("alice") == ""
