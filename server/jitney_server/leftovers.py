"""What a server has on this machine beside its processes, and how it goes when nobody is left to
remove it.

A server has a :class:`RunFolder` in the temporary folder, regions of shared memory whose names
begin with the name of that folder, and a folder ``/tmp/python_env_…`` for each backend in Python.
The launcher removes all of it at the end. If it was killed, the next start does (:func:`sweep`).
For that the folder holds a record of the processes that use it. A process is known
by its id and the time of its start, because ids are used again.

Nothing of another user is touched, and nothing that may belong to a server that lives.
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
"""Of the names of all run folders."""
_LOG = logging.getLogger(__name__)
_RECORD = "owner.json"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_SYSTEM_ID = Path("/etc/machine-id")
_SHARED_MEMORY = Path("/dev/shm")
_ENVIRONMENTS = Path("/tmp")
"""Where the server's Python backend makes its folders, whatever TMPDIR says."""
_ENVIRONMENT = re.compile(r"python_env_[A-Za-z0-9]{6}")
"""Their names, which mkdtemp(3) makes."""
_PYTHON_BACKEND = "libtriton_python.so"
_FILE_LAG_S = 0.02
"""The time of a new file is that of the kernel's last tick, so many seconds ago at most."""
_BOOT_LAG_S = 1.5
"""The time at which a process was started is known up to so many seconds only."""


class ProcessKey(msgspec.Struct, frozen=True):
    """A process, told apart from a later one with the same id."""

    pid: int
    started: int
    """Ticks of the clock since the machine was booted."""


class Machine(msgspec.Struct, frozen=True):
    """Where process ids have a meaning. Empty: this system does not tell."""

    host: str
    boot: str
    namespace: str
    """Of process ids: containers have their own."""
    system: str = ""
    """Tells apart machines with the same host name: machine-id(5), which many containers lack."""


class Owner(msgspec.Struct, frozen=True):
    """The record in a run folder."""

    machine: Machine
    launcher: ProcessKey
    launched_at: float
    """Seconds of the wall clock, which the times of files are in, too."""
    server: ProcessKey | None = None
    """None: it was not started yet."""
    ready_at: float | None = None
    """None: it is not ready yet. By then it has made its folders in ``/tmp``."""


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

    def note_server(self, pid: int) -> None:
        """The server has been started."""
        self._owner = msgspec.structs.replace(self._owner, server=_key_of(pid))
        self._write()

    def note_ready(self) -> None:
        """The server is ready."""
        self._owner = msgspec.structs.replace(self._owner, ready_at=time.time())
        self._write()

    def remove(self) -> None:
        """Remove the folder and what the server has left elsewhere. The server has ended."""
        _remove(self.path, self._owner)

    def _write(self) -> None:
        # Another start may read the record at any time.
        written = self.path / f"{_RECORD}.new"
        written.write_bytes(msgspec.json.encode(self._owner))
        written.replace(self.path / _RECORD)


def sweep() -> None:
    """Remove what dead servers of this user have left, and kill the processes of their models. What
    cannot be removed stays, with a warning: a server can start all the same."""
    for path, owner in _owned_folders():
        try:
            if not _may_live(owner):
                _remove(path, owner)
        except OSError as error:
            _LOG.warning("what a dead server has left in %s cannot be removed: %s", path, error)


def _owned_folders() -> Iterator[tuple[Path, Owner]]:
    """The run folders of this user that have a record. One without a record may be just being
    made."""
    found = (path for parent in runtime_parents() for path in Path(parent).glob(f"{PREFIX}*"))
    for path in found:
        if not _is_own_folder(path):
            continue
        try:
            owner = msgspec.json.decode((path / _RECORD).read_bytes(), type=Owner)
        except (OSError, msgspec.MsgspecError):
            continue
        yield path, owner


def _remove(path: Path, owner: Owner) -> None:
    """Remove what the server of a run folder has left. The folder goes last: if this is
    interrupted, the next sweep goes on."""
    _kill_programs_in(path)
    for region in _SHARED_MEMORY.glob(f"{path.name}-*"):
        with contextlib.suppress(OSError):
            if region.lstat().st_uid == os.geteuid():
                region.unlink()
    for environment in _environments_of(path, owner):
        shutil.rmtree(environment, ignore_errors=True)
    shutil.rmtree(path, ignore_errors=True)


def _kill_programs_in(path: Path) -> None:
    """Kill the processes that run a program of this folder: stubs, which outlive their server if
    they wait for it."""
    folder = path.resolve()  # the system names programs so
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if Path(process.exe()).is_relative_to(folder):
                process.kill()


# ------------------------------------------------------------------------------- who lives


def _may_live(owner: Owner) -> bool:
    """Whether the launcher or the server lives, or nobody can tell."""
    here = _this_machine()
    if (owner.machine.host, owner.machine.system) != (here.host, here.system):
        return True  # the folder is on a disk that another machine uses, too
    if not owner.machine.boot or not here.boot:
        return True  # ids and times are of nobody knows which start of the machine
    if owner.machine.boot != here.boot:
        return False
    if not here.namespace or owner.machine.namespace != here.namespace:
        return True
    keys = [owner.launcher] if owner.server is None else [owner.launcher, owner.server]
    return any(_key_of(key.pid) == key for key in keys)


def _key_of(pid: int) -> ProcessKey | None:
    """The key of the process with this id. None: it has ended."""
    try:
        status = Path("/proc", str(pid), "stat").read_bytes()
    except OSError:
        return None
    # The name of the program, in brackets, may hold spaces. Behind it begins field 3 of proc(5).
    fields = status.rpartition(b")")[2].split()
    if fields[0] in (b"Z", b"X"):
        return None
    return ProcessKey(pid, int(fields[22 - 3]))


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
    """Empty: there is none, or a sandbox hides it."""
    try:
        return file.read_text(encoding="ascii").strip()
    except (OSError, UnicodeError):
        return ""


def _is_own_folder(path: Path) -> bool:
    """Whether it is a folder of this user, and no link to one."""
    try:
        status = path.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()


# ------------------------------------------------------------------------------- /tmp/python_env_…


def _environments_of(path: Path, owner: Owner) -> list[Path]:
    """The folders that the Python backend of this server has made, and that no living server can
    have made. Their names do not tell whose they are, but their times do: they were made while the
    server started."""
    found = []
    for folder in _ENVIRONMENTS.glob("python_env_*"):
        if _ENVIRONMENT.fullmatch(folder.name) is None:
            continue  # somebody else's name
        # Another server that ends now may remove its folders meanwhile.
        with contextlib.suppress(OSError):
            if _is_own_folder(folder) and _was_starting(owner, folder.lstat().st_mtime):
                found.append(folder)
    if not found:
        return []
    others = []
    for other_path, other in _owned_folders():
        if other_path != path and _may_live(other):
            others.append(other)
    known = {other.server.pid for other in others if other.server is not None}
    foreign = _starts_of_servers_except(known)
    return [folder for folder in found if not _may_be_of(folder, others, foreign)]


def _may_be_of(folder: Path, others: list[Owner], foreign: list[float]) -> bool:
    """Whether a living server can have made the folder: one of ``others``, or one of those that
    ``foreign`` has the times of start of."""
    try:
        made_at = folder.lstat().st_mtime
        is_empty = not any(folder.iterdir())
    except OSError:
        return True
    if any(started_at - _BOOT_LAG_S <= made_at for started_at in foreign):
        return True
    if is_empty:
        return any(_was_starting(other, made_at) for other in others)
    # The time of a folder is that of its last entry. A server unpacks a Python environment, which
    # is an entry, whenever it loads a model that has one.
    return any(other.launched_at - _FILE_LAG_S <= made_at for other in others)


def _was_starting(owner: Owner, at: float) -> bool:
    """Whether the server was starting at that time of the wall clock, or has not been ready
    since."""
    if at < owner.launched_at - _FILE_LAG_S:
        return False
    return owner.ready_at is None or at <= owner.ready_at


def _starts_of_servers_except(known: set[int]) -> list[float]:
    """When the processes of this user that have the Python backend in memory were started. Nothing
    is known of them: others have started them."""
    starts = []
    for process in psutil.process_iter():
        if process.pid in known:
            continue
        with contextlib.suppress(psutil.Error, OSError):
            maps = Path("/proc", str(process.pid), "maps").read_text(errors="replace")
            if process.uids().effective == os.geteuid() and _PYTHON_BACKEND in maps:
                starts.append(process.create_time())
    return starts
