"""What runs in the processes of an engine.

:mod:`jitney.engine.fork_server` starts ``python -m jitney.engine.process FD AHEAD… LOADER``: the
fork server. It calls the functions named by AHEAD, then imports and calls LOADER, which takes
seconds and returns a :data:`~jitney.engine.loading.LoadModel`. Whenever a socket comes through FD,
it forks an engine that talks over that socket. So a new engine has only the model to load.

Before the fork nothing of ours may start a thread or touch a device. (NumPy's OpenBLAS has threads
by then. It takes care of them in a fork.)

The fork server ends when the other end of FD closes, an engine when the other end of its socket
does. So a kill of the front ends them too.
"""

import contextlib
import ctypes
import gc
import logging
import os
import pkgutil
import signal
import socket
import struct
import sys
import threading
import traceback
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NoReturn

from jitney.engine.engine import Engine
from jitney.engine.loading import LoadModel
from jitney.engine.quiet import lean_imports, quiet_imports
from jitney.engine.wire import (
    Frames,
    LoadRefused,
    Logged,
    Making,
    Ready,
    RowOwner,
    Start,
    StepBegun,
    Stop,
    ToEngine,
)
from jitney.errors import DeviceLostError, JitneyError, LoadError, UnavailableError
from jitney.messages import Cancel, Finish, StepReport, Submit

_log = logging.getLogger(__name__)

NUMBER = struct.Struct("<q")
"""Form of the two numbers that the fork server sends for each engine: its pid once it is forked,
then its exit status once it has ended (negative: the signal that ended it)."""

DEVICE_LOST = 3
"""Exit status: the device failed for good."""

_OOM_SCORE = 500
"""Above the front's: when memory is short, the kernel ends the engine, which is started again."""

_PR_SET_PDEATHSIG = 1
"""Of ``prctl``: the signal that this process gets when its parent ends."""

# --------------------------------------------------------------------------- the fork server


def run_fork_server(descriptor: int, ahead: Sequence[str], loader: str) -> int:
    """Fork an engine for each socket that comes, one at a time, and send its pid and exit status.
    Returns the fork server's own exit status once the front has closed its end. The functions named
    by ``ahead`` may fork processes that compile kernels. No pid or exit status of these is sent."""
    _end_only_with_parent()
    own_pid = os.getpid()
    load = _prepare(ahead, loader)
    with socket.socket(fileno=descriptor) as control:
        while True:
            # A request is one byte, of any value, and a socket.
            data, sockets, _, _ = socket.recv_fds(control, 1, 1)
            if not data:
                return 0
            pid = os.fork()
            if pid == 0:
                gc.enable()
                control.close()
                _run_engine_and_exit(sockets[0], load, parent=own_pid)
            os.close(sockets[0])
            control.sendall(NUMBER.pack(pid))
            control.sendall(NUMBER.pack(_wait_for(pid)))


def _prepare(ahead: Sequence[str], loader: str) -> LoadModel:
    """Import what every engine needs. Its pages are shared by all that are forked."""
    quiet_imports()
    # Imported modules are no garbage, but the collector would look through them again and again: an
    # eighth of the imports' time. An engine enables it again.
    gc.disable()
    with lean_imports():
        for name in ahead:
            _compile_ahead(name)
    load = _call_loader(loader)
    gc.freeze()  # else the engine's first collection would copy every page that has an object
    return load


def _call_loader(loader: str) -> LoadModel:
    """Import and call LOADER, if possible without the libraries that serving does not need."""
    load: LoadModel
    try:
        with lean_imports():
            load = pkgutil.resolve_name(loader)()
    except ImportError:
        # A package that is installed here needs one of these libraries: import them too.
        load = pkgutil.resolve_name(loader)()
    return load


def _compile_ahead(name: str) -> None:
    """Call an entry point of ``jitney.ahead``. If it cannot be imported, only the first start takes
    longer."""
    try:
        pkgutil.resolve_name(name)()
    except ImportError as error:
        _log.warning("nothing is compiled ahead by %s: %s", name, error)


def _wait_for(pid: int) -> int:
    """The exit status of an engine. Other children, which AHEAD has forked, may end before it."""
    while True:
        ended, status = os.wait()
        if ended == pid:
            return os.waitstatus_to_exitcode(status)


def _run_engine_and_exit(descriptor: int, load: LoadModel, parent: int) -> NoReturn:
    """In the forked process. It leaves by ``os._exit``, so that no code of the fork server, such as
    an exit handler, runs in it."""
    status = 1
    try:
        # Else a process that the engine starts would keep the socket open after the engine's end.
        os.set_inheritable(descriptor, False)
        _end_only_with_parent()
        if os.getppid() != parent:  # it ended before the call above, so no signal will come
            os._exit(1)
        status = run_engine(descriptor, load)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


# --------------------------------------------------------------------------- an engine


class _Reports:
    """The engine's outbox: sends its reports to the front. It also sends, before the engine begins
    any work for requests, which requests these are."""

    def __init__(self, frames: Frames[ToEngine]) -> None:
        self._frames = frames

    def put(self, report: StepReport) -> None:
        self._frames.send(report)

    def begin_step(self, in_flight: Iterable[RowOwner], new: Iterable[RowOwner]) -> None:
        """Send whose rows these are, so that the front knows which requests were being computed if
        the engine dies. See ``steps.BeforeStep``."""
        self._frames.send(StepBegun(list(in_flight), new=list(new)))

    def note_making(self, number: int, kind: str, keys: list[int]) -> None:
        """Send whose resource is about to be made, for the same purpose; see ``wire.Making``. Also
        called from other threads."""
        self._frames.send(Making(number, kind, keys))


def run_engine(descriptor: int, load: LoadModel) -> int:
    """Load a model and make steps until told to stop. The exit status."""
    frames: Frames[ToEngine] = Frames(socket.socket(fileno=descriptor), ToEngine)
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(str(_OOM_SCORE), encoding="ascii")
    _log_to(frames)
    start = frames.receive()
    assert isinstance(start, Start)
    try:
        parts = load(start.config, start.tokenizer)
    except MemoryError:
        return _refuse(frames, LoadError("the model does not fit into memory"))
    except JitneyError as error:
        return _refuse(frames, error)
    front = _Reports(frames)
    engine = Engine(
        start.config,
        parts.runner,
        before_step=front.begin_step,
        compile_grammar=parts.compile_grammar,
        adapters=parts.adapters,
        note_making=front.note_making,
    )
    frames.send(Ready(engine.info, parts.tokenizer))
    threading.Thread(target=_read, args=(frames, engine), name="jitney-inbox", daemon=True).start()
    try:
        engine.run(front)
    except DeviceLostError:
        _log.exception("the device is lost")
        return DEVICE_LOST
    except Exception:
        _log.exception("the engine has died")
        return 1
    return 0


def _refuse(frames: Frames[ToEngine], error: JitneyError) -> int:
    frames.send(LoadRefused(type(error).__name__, str(error)))
    return 1


def _read(frames: Frames[ToEngine], engine: Engine) -> None:
    """In a thread: hand the front's messages to the engine. Once the front is gone, which is no
    error, or if this fails, end the process at once, even in the middle of a step."""
    status = 1
    try:
        while True:
            message = frames.receive()
            if isinstance(message, Stop):
                engine.stop()
            elif isinstance(message, Submit | Finish | Cancel):
                # An engine that is ending by itself takes no Submit. The front sends it to the next
                # one.
                with contextlib.suppress(UnavailableError):
                    engine.send(message)
    except EOFError:
        status = 0
    except Exception:
        _log.exception("the engine cannot read what the front sends")
    finally:
        os._exit(status)


def _end_only_with_parent() -> None:
    """Ask the kernel for SIGKILL when the parent's thread that started this process ends, and
    ignore SIGINT and SIGTERM: the front decides when its engine ends. The end of the socket is not
    enough, because a step on the device may keep :func:`_read` from noticing it."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


# --------------------------------------------------------------------------- its log


def _log_to(frames: Frames[ToEngine]) -> None:
    """Send our log records to the front alone: this process must not write to the server's log."""
    log = logging.getLogger("jitney")
    log.setLevel(logging.INFO)
    log.propagate = False
    log.handlers[:] = [_FrontLog(frames)]


class _FrontLog(logging.Handler):
    """Sends log records to the front, which logs them as its own."""

    def __init__(self, frames: Frames[ToEngine]) -> None:
        super().__init__()
        self._frames = frames

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(OSError):
            self._frames.send(Logged(record.name, record.levelno, self.format(record)))


if __name__ == "__main__":
    sys.exit(run_fork_server(int(sys.argv[1]), ahead=sys.argv[2:-1], loader=sys.argv[-1]))
