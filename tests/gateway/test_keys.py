"""API keys of a gateway: a file that changes."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from jitney.errors import ConfigError
from jitney_gateway.app import make_app
from jitney_gateway.keys import FileKeys
from jitney_gateway.refusals import UnknownModelError
from starlette.testclient import TestClient

OLD, NEW = "o" * 24, "n" * 24


class NoModels:
    """In place of a server."""

    async def find_model(self, name: str) -> None:
        raise UnknownModelError(name)


def write(file: Path, text: str) -> None:
    """In place, at another time than before."""
    before = file.stat().st_ctime_ns if file.exists() else 0
    file.write_text(text, encoding="utf-8")
    while file.stat().st_ctime_ns == before:
        file.touch()


def test_a_key_that_is_taken_away_is_refused_from_then_on(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    write(file, f"# keys\n\nalice:{OLD}\n")
    client = TestClient(make_app(NoModels(), FileKeys(file)))  # type: ignore[arg-type]

    def status(key: str) -> int:
        return client.get("/v1/models/m", headers={"authorization": f"Bearer {key}"}).status_code

    assert (status(OLD), status(NEW)) == (404, 401)
    write(file, f"alice:{NEW}\n")
    assert (status(OLD), status(NEW)) == (401, 404)


@pytest.mark.parametrize("text", ["", "# nobody\n", "alice:short\n", "alice\n"])
def test_keys_stay_while_the_file_cannot_be_used(
    tmp_path: Path, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "keys"
    write(file, text)
    with pytest.raises(ConfigError, match="keys"):
        FileKeys(file)
    write(file, f"alice:{OLD}\n")
    keys = FileKeys(file)
    write(file, text)
    assert dict(keys.refreshed_owners()) == {OLD: "alice"}
    assert caplog.text.count("stay as they were") == 1
    assert dict(keys.refreshed_owners()) == {OLD: "alice"}
    assert caplog.text.count("stay as they were") == 1
    file.unlink()
    assert dict(keys.refreshed_owners()) == {OLD: "alice"}
    write(file, f"alice:{NEW}\n")
    assert dict(keys.refreshed_owners()) == {NEW: "alice"}


@contextmanager
def reading_raises(monkeypatch: pytest.MonkeyPatch, error: OSError) -> Iterator[None]:
    def fail(path: Path, encoding: str) -> str:
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(Path, "read_text", fail)
        yield


def test_a_file_is_read_once_its_mode_lets_the_gateway_read_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "keys"
    write(file, f"alice:{OLD}\n")
    keys = FileKeys(file)
    write(file, f"alice:{NEW}\n")

    # The mode does not keep root, who may run this test, from reading.
    with reading_raises(monkeypatch, PermissionError(13, "Permission denied")):
        assert dict(keys.refreshed_owners()) == {OLD: "alice"}
    before = file.stat()
    while file.stat().st_ctime_ns == before.st_ctime_ns:
        file.chmod(0o644)
    assert file.stat().st_mtime_ns == before.st_mtime_ns
    assert dict(keys.refreshed_owners()) == {NEW: "alice"}


def test_a_reason_that_passes_needs_no_change_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "keys"
    write(file, f"alice:{OLD}\n")
    keys = FileKeys(file)
    write(file, f"alice:{NEW}\n")

    with reading_raises(monkeypatch, OSError(24, "Too many open files")):
        for _ in range(2):
            assert dict(keys.refreshed_owners()) == {OLD: "alice"}
    assert caplog.text.count("stay as they were") == 1
    assert dict(keys.refreshed_owners()) == {NEW: "alice"}


class LateService:
    """In place of a mounted service: it has a key once the disk is no longer full."""

    is_disk_full = True

    def keys_of(self, owner: str) -> dict[str, str]:
        if self.is_disk_full:
            raise OSError(28, "No space left on device")
        return {f"of-a-service-{owner}": owner}


def test_a_services_key_is_asked_for_again_after_a_reading_that_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "keys"
    write(file, f"alice:{OLD}\n")
    service = LateService()
    keys = FileKeys(file, [service])  # type: ignore[list-item]

    def fail(path: Path, encoding: str) -> str:
        raise OSError(24, "Too many open files", str(path))

    with monkeypatch.context() as patched:
        patched.setattr(Path, "read_text", fail)
        assert dict(keys.refreshed_owners()) == {OLD: "alice"}
    service.is_disk_full = False
    assert dict(keys.refreshed_owners()) == {OLD: "alice", "of-a-service-alice": "alice"}


def test_limits_belong_to_an_owner_and_all_his_keys(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    text = f"alice:{OLD}   tiers=bulk  min_priority=0\nbob:{NEW}\n"
    write(file, text)
    keys = FileKeys(file)
    assert [keys.limits(name) for name in ("alice", "bob")] == ["tiers=bulk min_priority=0", ""]
    for more in (f"alice:{NEW[1:]}x\n", f"bob:{NEW[1:]}x tier=bulk\n"):
        write(file, text + more)
        with pytest.raises(ConfigError, match=r"line 3: .*(other limits|tier=bulk)"):
            FileKeys(file)
    assert keys.limits("alice") == "tiers=bulk min_priority=0"
    write(file, f"{text}bob:{NEW[1:]}x tiers=bulk,night/day\n")
    with pytest.raises(ConfigError, match=r"line 3: tiers is 'night/day', but must be of letters"):
        FileKeys(file)
    write(file, f"alice:{OLD}\n")
    keys.refreshed_owners()
    assert keys.limits("alice") == ""
