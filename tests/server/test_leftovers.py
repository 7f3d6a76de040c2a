"""What is removed of dead servers, and what stays of living ones and of other users."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import psutil
import pytest
from jitney_server import leftovers
from jitney_server.leftovers import Machine, Owner, ProcessKey, RunFolder, sweep

from tests.real_server.client import wait_until

LAUNCHER = """
import os, pathlib, subprocess, sys, time
from jitney_server.leftovers import RunFolder
folder = RunFolder()
log = folder.path.with_suffix(".log")
folder.note_log(log)
log.touch()
server = subprocess.Popen(["sleep", "3600"])
folder.note_server(server.pid)
environment = pathlib.Path(sys.argv[1], f"python_env_{os.urandom(3).hex()}")
environment.mkdir()
if "ready" in sys.argv:
    time.sleep(0.05)  # a file's time may be older than the clock's by some milliseconds
    folder.note_ready()
print(folder.path, server.pid, environment, flush=True)
time.sleep(3600)
"""


class Machinery:
    """Folders of a test in place of the machine's."""

    def __init__(self, folder: Path) -> None:
        self.temporary = folder / "temporary"
        self.shared = folder / "shared"
        self.environments = folder / "environments"
        for each in (self.temporary, self.shared, self.environments):
            each.mkdir()

    def names(self) -> set[str]:
        """Of all files in them."""
        places = (self.temporary, self.shared, self.environments)
        return {entry.name for place in places for entry in place.iterdir()}


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machinery:
    made = Machinery(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(made.temporary))
    monkeypatch.setattr(leftovers, "_SHARED_MEMORY", made.shared)
    monkeypatch.setattr(leftovers, "_ENVIRONMENTS", made.environments)
    # Servers of other tests run on this machine.
    monkeypatch.setattr(leftovers, "_PYTHON_BACKEND", "nobody has this in memory")
    return made


class Launched:
    """A launcher in a process of its own, with a server, a log, a region and a folder in `/tmp`."""

    def __init__(self, machine: Machinery, *words: str) -> None:
        environment = {**os.environ, "TMPDIR": str(machine.temporary)}
        command = [sys.executable, "-c", LAUNCHER, str(machine.environments), *words]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        assert self.process.stdout is not None
        folder, server, python = self.process.stdout.readline().split()
        self.folder = Path(folder)
        self.server = psutil.Process(int(server))
        self.region = machine.shared / f"{self.folder.name}-region"
        self.region.write_bytes(b"x")
        self.name_of = {
            "folder": self.folder.name,
            "log": f"{self.folder.name}.log",
            "region": self.region.name,
            "environment": Path(python).name,
        }
        self.names = set(self.name_of.values())

    def kill(self) -> None:
        """End the launcher, as `kill -9` does, and then its server."""
        self.process.kill()
        self.process.wait()
        self.kill_server()

    def kill_server(self) -> None:
        if self.server.is_running():
            self.server.kill()
            wait_until(lambda: not is_alive(self.server))


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.fixture
def launched(machine: Machinery) -> Iterator[list[Launched]]:
    made: list[Launched] = []
    yield made
    for each in made:
        each.kill()


def test_what_a_killed_server_left_is_removed_and_what_lives_stays(
    machine: Machinery, launched: list[Launched]
) -> None:
    dead = Launched(machine, "ready")
    launched.append(dead)
    time.sleep(0.1)
    living = Launched(machine, "ready")
    launched.append(living)
    dead.kill()
    (machine.shared / "of-somebody-else").write_bytes(b"x")
    sweep()
    assert machine.names() == living.names | {"of-somebody-else"}


@pytest.mark.parametrize("dies", ["launcher", "server"])
def test_nothing_goes_while_the_launcher_or_the_server_lives(
    machine: Machinery, launched: list[Launched], dies: str
) -> None:
    """A launcher starts its server again; and a server that was started by another thread than the
    main one outlives its launcher."""
    made = Launched(machine, "ready")
    launched.append(made)
    if dies == "launcher":
        made.process.kill()
        made.process.wait()
    else:
        made.kill_server()
    sweep()
    assert machine.names() == made.names
    made.kill()
    sweep()
    assert machine.names() == set()


def test_a_folder_that_a_starting_server_may_have_made_stays(
    machine: Machinery, launched: list[Launched]
) -> None:
    """Both were starting when either made its folder in `/tmp`: nobody can tell whose is which."""
    both = [Launched(machine), Launched(machine)]
    launched.extend(both)
    both[1].kill()
    sweep()
    of_environments = {name for name in machine.names() if name.startswith("python_env")}
    assert machine.names() - of_environments == {
        name for name in both[0].names if not name.startswith("python_env")
    }
    assert both[0].names <= machine.names()
    both[0].kill()
    sweep()
    assert machine.names() == set()


def another_user(machine: Machinery, monkeypatch: pytest.MonkeyPatch) -> None:
    own = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: own + 1)


def unknown_boot(machine: Machinery, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a sandbox."""
    monkeypatch.setattr(leftovers, "_BOOT_ID", machine.temporary / "none")


def nothing_can_be_removed(machine: Machinery, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: Path) -> None:
        raise PermissionError(path)

    monkeypatch.setattr(leftovers, "_kill_programs_in", fail)


def a_server_without_a_record(machine: Machinery, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have made the folder in `/tmp`."""
    monkeypatch.setattr(leftovers, "_PYTHON_BACKEND", "python")  # this very process has it


@pytest.mark.parametrize(
    ("circumstance", "kinds"),
    [
        (another_user, {"folder", "region", "environment", "log"}),
        (unknown_boot, {"folder", "region", "environment", "log"}),
        (nothing_can_be_removed, {"folder", "region", "environment"}),
        (a_server_without_a_record, {"environment"}),
    ],
)
def test_what_stays_of_a_dead_server(
    machine: Machinery,
    launched: list[Launched],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    circumstance: Callable[[Machinery, pytest.MonkeyPatch], None],
    kinds: set[str],
) -> None:
    dead = Launched(machine, "ready")
    launched.append(dead)
    dead.kill()
    circumstance(machine, monkeypatch)
    sweep()
    assert machine.names() == {dead.name_of[kind] for kind in kinds}
    is_said = str(dead.folder) in caplog.text
    assert is_said == (circumstance == nothing_can_be_removed)


def test_a_run_folder_goes_where_the_boot_is_not_known(
    machine: Machinery, monkeypatch: pytest.MonkeyPatch
) -> None:
    unknown_boot(machine, monkeypatch)
    folder = RunFolder()
    folder.remove()
    assert not folder.path.exists()


HERE = leftovers._this_machine()
ANOTHER = {
    name: msgspec.structs.replace(HERE, **fields)
    for name, fields in {
        "boot": {"boot": "another"},
        "unknown boot": {"boot": ""},
        "container": {"namespace": "another"},
        "host": {"host": "another", "boot": "another"},
        "system": {"system": "another", "boot": "another"},
    }.items()
}


def record(machine_of_record: Machine) -> bytes:
    """Of a launcher that has ended. Its id is used again, by this process."""
    launcher = ProcessKey(os.getpid(), started=1)
    return msgspec.json.encode(Owner(machine_of_record, launcher, launched_at=time.time()))


@pytest.mark.parametrize(
    ("content", "stays"),
    [
        # The folder is just being made, or an older version has made it.
        (None, True),
        (b"", True),
        (b"{}", True),
        (b"\xff", True),
        # The id of a process has a meaning on its own machine, and until that is booted.
        (record(HERE), False),
        (record(ANOTHER["boot"]), False),
        (record(ANOTHER["unknown boot"]), True),
        (record(ANOTHER["container"]), True),
        (record(ANOTHER["host"]), True),
        (record(ANOTHER["system"]), True),
    ],
)
def test_which_records_are_those_of_the_dead(
    machine: Machinery, content: bytes | None, stays: bool
) -> None:
    folder = machine.temporary / "jitney-server-x"
    folder.mkdir()
    if content is not None:
        (folder / "owner.json").write_bytes(content)
    sweep()
    assert folder.exists() == stays


def test_a_link_to_a_folder_is_not_followed(machine: Machinery, tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "owner.json").write_bytes(record(HERE))
    (machine.temporary / "jitney-server-x").symlink_to(precious)
    sweep()
    assert (precious / "owner.json").exists()


@pytest.mark.parametrize("name", ["other.log", "sub/jitney-server-x.log"])
def test_a_record_names_no_file_but_a_temporary_log(machine: Machinery, name: str) -> None:
    log = machine.temporary / name
    log.parent.mkdir(exist_ok=True)
    log.touch()
    folder = machine.temporary / "jitney-server-x"
    folder.mkdir()
    owner = Owner(HERE, ProcessKey(os.getpid(), started=1), launched_at=0.0, log=str(log))
    (folder / "owner.json").write_bytes(msgspec.json.encode(owner))
    sweep()
    assert not folder.exists()
    assert log.exists()


def test_an_environment_that_a_ready_server_unpacks_stays(
    machine: Machinery, launched: list[Launched]
) -> None:
    """Another server starts at that time, and ends. An empty folder of that time can be only its
    own."""
    living = Launched(machine, "ready")
    launched.append(living)
    time.sleep(0.1)
    folder = RunFolder()
    unpacked = next(machine.environments.iterdir()) / "0"
    unpacked.mkdir()
    (machine.environments / "python_env_aB3xYz").mkdir()
    folder.remove()
    assert machine.names() == living.names
    assert unpacked.exists()


def test_a_folder_with_another_name_than_the_backend_makes_stays(
    machine: Machinery, launched: list[Launched]
) -> None:
    """The server was never ready: nobody knows until when it made folders."""
    dead = Launched(machine)
    launched.append(dead)
    for name in ("python_env_project", "python_env_abc", "python_env_ab-def"):
        (machine.environments / name).mkdir()
    dead.kill()
    sweep()
    assert machine.names() == {"python_env_project", "python_env_abc", "python_env_ab-def"}


def test_a_folder_that_goes_while_it_is_looked_at_stops_nothing(
    machine: Machinery, launched: list[Launched], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two servers end at once."""
    dead = Launched(machine, "ready")
    launched.append(dead)
    dead.kill()
    is_own_folder = leftovers._is_own_folder

    def look_late(path: Path) -> bool:
        is_own = is_own_folder(path)
        if path.parent == machine.environments:
            path.rmdir()
        return is_own

    monkeypatch.setattr(leftovers, "_is_own_folder", look_late)
    sweep()
    assert machine.names() == set()


@pytest.mark.parametrize("is_linked", [False, True])
def test_a_stub_that_outlives_its_server_is_killed(
    machine: Machinery,
    launched: list[Launched],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    is_linked: bool,
) -> None:
    if is_linked:  # TMPDIR is a link
        link = tmp_path / "link"
        link.symlink_to(machine.temporary)
        monkeypatch.setattr(tempfile, "tempdir", str(link))
        monkeypatch.setattr(machine, "temporary", link)
    dead = Launched(machine, "ready")
    launched.append(dead)
    program = Path(shutil.copy(shutil.which("sleep") or "", dead.folder / "stub"))
    with subprocess.Popen([str(program), "3600"]) as stub:
        sweep()
        assert stub.poll() is None
        dead.kill()
        sweep()
        assert stub.wait(60) == -signal.SIGKILL
    assert machine.names() == set()


def test_a_server_that_ends_leaves_nothing(machine: Machinery) -> None:
    folder = RunFolder()
    (folder.path / "backends").mkdir()
    (machine.shared / f"{folder.name}-1").write_bytes(b"x")
    (machine.environments / "python_env_aB3xYz").mkdir()
    folder.remove()
    assert machine.names() == set()
    folder.remove()
