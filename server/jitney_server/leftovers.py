"""The files that a server uses on this machine, and how they are removed after it was killed.

A server has

- a :class:`RunFolder` in the folder for temporary files,
- perhaps a temporary log beside it,
- regions of shared memory, whose names begin with the name of the run folder,
- a folder ``/tmp/python_env_…`` for each backend in Python.

Its launcher removes them at the end. If the launcher was killed, the next start of any server of
this user does (:func:`sweep`). For that, the run folder holds a record of the processes that use
it. A process is known by its id and the time of its start, because ids are used again.

Nothing that belongs to another user is touched, and nothing that may belong to a living server.
"""

import contextlib
import logging
import os
import re
import shutil
import socket
import stat
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import psutil

from jitney_server.plain_paths import make_runtime_folder, runtime_parents

PREFIX = "jitney-server-"
"""The names of all run folders and temporary logs begin with it."""
_LOG = logging.getLogger(__name__)
_RECORD = "owner.json"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_SYSTEM_ID = Path("/etc/machine-id")
_SHARED_MEMORY = Path("/dev/shm")
_ENVIRONMENTS = Path("/tmp")
"""Where the server's Python backend makes its folders, whatever TMPDIR says."""
_ENVIRONMENT = re.compile(r"python_env_[A-Za-z0-9]{6}")
"""The names of those folders, which mkdtemp(3) makes."""
_PYTHON_BACKEND = "libtriton_python.so"
_FILE_LAG_S = 0.02
"""The kernel gives a new file the time of its last clock tick. That is earlier than the real time
by this many seconds at most."""
_BOOT_LAG_S = 1.5
"""The start time that psutil gives for a process may be wrong by this many seconds."""


class ProcessKey(msgspec.Struct, frozen=True):
    """A process, told apart from a later one with the same id."""

    pid: int
    started: int
    """Clock ticks from the boot of the machine to the start of the process."""


class Machine(msgspec.Struct, frozen=True):
    """Where and when process ids are unique: on one machine, between two boots, in one namespace.
    A field is empty if this system hides it."""

    host: str
    boot: str
    """The id of the machine's last boot."""
    namespace: str
    """The namespace of process ids: a container has its own."""
    system: str = ""
    """The id of machine-id(5), which tells apart machines of one host name. Many containers have
    none."""


class Owner(msgspec.Struct, frozen=True):
    """The record in a run folder: who uses it."""

    machine: Machine
    launcher: ProcessKey
    launched_at: float
    """When the run folder was made, in seconds of the wall clock. The times of files are of this
    clock, too."""
    server: ProcessKey | None = None
    """None: it has not been started yet."""
    ready_at: float | None = None
    """Seconds of the wall clock. None: the server is not ready yet. Once it is, it makes no further
    folders in ``/tmp``."""
    log: str | None = None
    """The temporary log. None: the log is a file that the user has named."""


class RunFolder:
    """The folder of one run of a server. The caller puts into it what the server needs."""

    def __init__(self) -> None:
        """Makes the folder. Raises InstallationError if there is no place for one."""
        self.path = make_runtime_folder(PREFIX)
        launcher = _key_of(os.getpid())
        assert launcher is not None
        self._owner = Owner(_this_machine(), launcher, launched_at=time.time())
        self._write()

    @property
    def name(self) -> str:
        """The names of the server's regions of shared memory must begin with this and a ``-``."""
        return self.path.name

    @property
    def stop_note(self) -> Path:
        """Where the launcher tells the models that it stops the server."""
        return self.path / "stop"

    def note_log(self, log: Path) -> None:
        """The server will write, or writes, to this temporary log."""
        self._owner = msgspec.structs.replace(self._owner, log=str(log))
        self._write()

    def note_server(self, pid: int) -> None:
        """The server has been started."""
        self._owner = msgspec.structs.replace(self._owner, server=_key_of(pid))
        self._write()

    def note_ready(self) -> None:
        """The server is ready."""
        self._owner = msgspec.structs.replace(self._owner, ready_at=time.time())
        self._write()

    def remove(self) -> None:
        """Remove the folder and what the server has left elsewhere, but not its log. The server
        must have ended."""
        _remove(self.path, self._owner)

    def _write(self) -> None:
        # Another start may read the record at any time: it must find the old one or the new one.
        written = self.path / f"{_RECORD}.new"
        written.write_bytes(msgspec.json.encode(self._owner))
        written.replace(self.path / _RECORD)


def sweep() -> None:
    """Remove what dead servers of this user have left, and kill the processes of their models.

    What cannot be removed stays, with a warning: it keeps no server from starting.
    """
    for path, owner in _owned_folders():
        try:
            if not _may_live(owner):
                _remove_log(owner)
                _remove(path, owner)
        except OSError as error:
            _LOG.warning("what a dead server has left in %s cannot be removed: %s", path, error)


def _owned_folders() -> Iterator[tuple[Path, Owner]]:
    """The run folders of this user that have a record. A folder without a record is left alone:
    another process may just have made it, and may write its record next."""
    for parent in runtime_parents():
        for path in Path(parent).glob(f"{PREFIX}*"):
            owner = _read_owner(path) if _is_own_folder(path) else None
            if owner is not None:
                yield path, owner


def _read_owner(path: Path) -> Owner | None:
    try:
        return msgspec.json.decode((path / _RECORD).read_bytes(), type=Owner)
    except (OSError, msgspec.MsgspecError):
        return None


def _remove(path: Path, owner: Owner) -> None:
    """Remove what the server of a run folder has left, except its log."""
    _kill_programs_in(path)
    for region in _SHARED_MEMORY.glob(f"{path.name}-*"):
        with contextlib.suppress(OSError):
            if region.lstat().st_uid == os.geteuid():
                region.unlink()
    for environment in _environments_of(path, owner):
        shutil.rmtree(environment, ignore_errors=True)
    # The folder goes last: if this is interrupted before, the next sweep finds the record.
    shutil.rmtree(path, ignore_errors=True)


def _remove_log(owner: Owner) -> None:
    """Remove the temporary log of a dead server. Its launcher was killed, so no error has told the
    user to look there."""
    if owner.log is None:
        return
    log = Path(owner.log)
    # The record is this user's own. The name is looked at all the same, before a file is removed.
    if log.name.startswith(PREFIX) and str(log.parent) in runtime_parents():
        log.unlink(missing_ok=True)


def _kill_programs_in(path: Path) -> None:
    """Kill the processes whose program lies in this folder: stubs. A stub that waits for its server
    outlives it."""
    folder = path.resolve()  # /proc names programs without links
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if Path(process.exe()).is_relative_to(folder):
                process.kill()


# ------------------------------------------------------------------------------- who lives


def _may_live(owner: Owner) -> bool:
    """Whether the launcher or the server lives. True too if that cannot be told."""
    here = _this_machine()
    there = owner.machine
    if (there.host, there.system) != (here.host, here.system):
        return True  # another machine has made the folder: both share this disk
    if not there.boot or not here.boot:
        return True  # the machine may have been booted since, and ids begin anew then
    if there.boot != here.boot:
        return False
    if not here.namespace or there.namespace != here.namespace:
        return True  # the ids are those of another container
    keys = [owner.launcher]
    if owner.server is not None:
        keys.append(owner.server)
    return any(_key_of(key.pid) == key for key in keys)


def _key_of(pid: int) -> ProcessKey | None:
    """The key of the process with this id. None: it has ended."""
    try:
        status = Path("/proc", str(pid), "stat").read_bytes()
    except OSError:
        return None
    # Field 2 of proc_pid_stat(5) is the program's name in brackets, which may hold spaces. So the
    # fields are counted from the last bracket: the first of them is field 3.
    fields = status.rpartition(b")")[2].split()
    state = fields[3 - 3]
    start_time = fields[22 - 3]
    if state in (b"Z", b"X"):  # it has ended, and nobody has asked for its status
        return None
    return ProcessKey(pid, started=int(start_time))


def _this_machine() -> Machine:
    namespace = ""
    with contextlib.suppress(OSError):
        namespace = os.readlink("/proc/self/ns/pid")
    return Machine(
        host=socket.gethostname(),
        boot=_read_id(_BOOT_ID),
        namespace=namespace,
        system=_read_id(_SYSTEM_ID),
    )


def _read_id(file: Path) -> str:
    """The id in the file. Empty if there is no such file, or if a sandbox hides it."""
    try:
        return file.read_text(encoding="ascii").strip()
    except (OSError, UnicodeError):
        return ""


def _is_own_folder(path: Path) -> bool:
    """Whether this is a folder of this user. A link to one is none."""
    try:
        status = path.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()


# ------------------------------------------------------------------------------- /tmp/python_env_…


def _environments_of(path: Path, owner: Owner) -> list[Path]:
    """The folders in ``/tmp`` that the Python backend of this dead server has made.

    Their names do not tell which server has made them. Their times do: a server makes its folders
    while it starts. A folder stays if a living server may have made it.
    """
    found = []
    for folder in _ENVIRONMENTS.glob("python_env_*"):
        if _ENVIRONMENT.fullmatch(folder.name) is None:
            continue  # something else with a similar name
        # Another server that ends now may remove the folder meanwhile.
        with contextlib.suppress(OSError):
            if _is_own_folder(folder) and _was_starting(owner, folder.lstat().st_mtime):
                found.append(folder)
    if not found:
        return []
    living = _living_owners_except(path)
    recorded = {other.server.pid for other in living if other.server is not None}
    unrecorded_starts = _starts_of_servers_except(recorded)
    return [folder for folder in found if not _may_be_of_living(folder, living, unrecorded_starts)]


def _living_owners_except(path: Path) -> list[Owner]:
    """The owners of all other run folders that may live."""
    living = []
    for other_path, other in _owned_folders():
        if other_path != path and _may_live(other):
            living.append(other)
    return living


def _may_be_of_living(folder: Path, living: list[Owner], unrecorded_starts: list[float]) -> bool:
    """Whether a living server may have made the folder: one of ``living``, or one that has no
    record and was started at one of ``unrecorded_starts``."""
    try:
        changed_at = folder.lstat().st_mtime
        is_empty = not any(folder.iterdir())
    except OSError:
        return True
    # Of a server without a record only its start is known, not when it was ready: any folder that
    # was changed later may be its own.
    if any(started_at - _BOOT_LAG_S <= changed_at for started_at in unrecorded_starts):
        return True
    if is_empty:
        # It was not changed since it was made, and a server makes it while it starts.
        return any(_was_starting(other, changed_at) for other in living)
    # A server adds an entry to its folder, which changes it, whenever it loads a model with a
    # Python environment of its own. It does so after it was ready, too.
    return any(other.launched_at - _FILE_LAG_S <= changed_at for other in living)


def _was_starting(owner: Owner, at: float) -> bool:
    """Whether the server had been launched and was not ready yet, at this time of the wall
    clock."""
    if at < owner.launched_at - _FILE_LAG_S:
        return False
    return owner.ready_at is None or at <= owner.ready_at


def _starts_of_servers_except(recorded: set[int]) -> list[float]:
    """When the servers of this user were started that have no record: every process that has the
    Python backend in memory, except those whose ids are ``recorded``."""
    starts = []
    for process in psutil.process_iter():
        if process.pid in recorded:
            continue
        with contextlib.suppress(psutil.Error, OSError):
            maps = Path("/proc", str(process.pid), "maps").read_text(errors="replace")
            if process.uids().effective == os.geteuid() and _PYTHON_BACKEND in maps:
                starts.append(process.create_time())
    return starts
