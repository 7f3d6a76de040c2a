"""What runs in the processes of an engine.

:mod:`jitney.engine.fork_server` starts ``python -m jitney.engine.process FD AHEAD… LOADER``: the
fork server. It calls the functions named by AHEAD, then imports and calls LOADER, which takes
seconds. Whenever a socket comes through FD, it forks an engine that talks over that socket. So a
new engine has only the model to load.

Before the fork nothing of ours may start a thread or touch a device. (NumPy's OpenBLAS has threads
by then. It takes care of them in a fork.)

The fork server ends when the other end of FD closes, an engine when the other end of its socket
does. So whoever kills the front ends them too.
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
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from jitney.config import EngineConfig
from jitney.engine.engine import Engine
from jitney.engine.grammars import Compile
from jitney.engine.pending import Source
from jitney.engine.quiet import lean_imports, quiet_imports
from jitney.engine.wire import (
    Down,
    Frames,
    Logged,
    Ready,
    Refused,
    RowRange,
    Start,
    StepBegun,
    Stop,
)
from jitney.errors import DeviceLostError, JitneyError, LoadError
from jitney.execution.protocols import Runner
from jitney.messages import Adapter, Batch, Cancel, Finish, StepReport, Submit

_log = logging.getLogger(__name__)

LoadModel = Callable[[EngineConfig, bytes], tuple[Runner, bytes, Compile, Source[Adapter] | None]]
"""Loads a model. The bytes are its tokenizer's data if the front has them, else empty. Returns the
runner, the data if they were not given, what compiles grammars, and the adapters if it takes any.
LOADER does what every load needs, and returns this."""

NUMBER = struct.Struct("<q")
"""How the fork server tells a pid or an exit status (negative: a signal)."""

DEVICE_LOST = 3
"""Exit status: the device failed for good."""

_OOM_SCORE = 500
"""Above the front's: when memory is short, the kernel ends the engine, which is started again."""

_PR_SET_PDEATHSIG = 1

# --------------------------------------------------------------------------- the fork server


def serve_forks(descriptor: int, ahead: Sequence[str], loader: str) -> int:
    """Fork an engine for each socket that comes, one at a time, and tell its pid and exit status.
    Returns once nobody asks any more. ``ahead`` may fork processes of its own."""
    _die_with_parent()
    load = _prepare(ahead, loader)
    with socket.socket(fileno=descriptor) as control:
        while True:
            data, sockets, _, _ = socket.recv_fds(control, 1, 1)
            if not data:
                return 0
            pid = os.fork()
            if pid == 0:
                gc.enable()
                control.close()
                _serve_and_exit(sockets[0], load)
            os.close(sockets[0])
            control.sendall(NUMBER.pack(pid))
            control.sendall(NUMBER.pack(_wait_for(pid)))


def _prepare(ahead: Sequence[str], loader: str) -> LoadModel:
    """Import what every engine needs. Its pages are shared by all that are forked."""
    quiet_imports()
    # What is imported stays: to look for garbage in it takes an eighth of the time.
    gc.disable()
    with lean_imports():
        for name in ahead:
            pkgutil.resolve_name(name)()
    try:
        with lean_imports():
            load: LoadModel = pkgutil.resolve_name(loader)()
    except ImportError:  # a package that is installed here does need what is hidden
        load = pkgutil.resolve_name(loader)()
    gc.freeze()  # else the engine's first collection would copy every page that has an object
    return load


def _wait_for(pid: int) -> int:
    """The exit status of an engine. What was forked ahead may end before it."""
    while True:
        ended, status = os.wait()
        if ended == pid:
            return os.waitstatus_to_exitcode(status)


def _serve_and_exit(descriptor: int, load: LoadModel) -> NoReturn:
    """In the forked process: when it ends, nothing of the fork server may run in it."""
    status = 1
    try:
        os.set_inheritable(descriptor, False)
        status = serve(descriptor, load)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


# --------------------------------------------------------------------------- an engine


class _ToFront:
    """The engine's outbox, and whom it tells what it is about to compute."""

    def __init__(self, frames: Frames[Down]) -> None:
        self._frames = frames

    def put(self, report: StepReport) -> None:
        self._frames.send(report)

    def begin_step(self, batches: list[Batch]) -> None:
        """Name the rows of the steps in flight, so that the front knows who was at work."""
        spans: list[RowRange] = []
        for batch in batches:
            spans += [RowRange(row.key, row.index, row.start, row.end) for row in batch.rows]
        self._frames.send(StepBegun(spans))


def serve(descriptor: int, load: LoadModel) -> int:
    """Load a model and make steps until told to stop. The exit status."""
    _die_with_parent()
    frames: Frames[Down] = Frames(socket.socket(fileno=descriptor), Down)
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(str(_OOM_SCORE), encoding="ascii")
    _log_to(frames)
    start = frames.receive()
    assert isinstance(start, Start)
    try:
        runner, tokenizer, compile_grammar, adapters = load(start.config, start.tokenizer)
    except MemoryError:
        return _refuse(frames, LoadError("the model does not fit into memory"))
    except JitneyError as error:
        return _refuse(frames, error)
    front = _ToFront(frames)
    engine = Engine(
        start.config,
        runner,
        before_step=front.begin_step,
        compile_grammar=compile_grammar,
        adapters=adapters,
    )
    frames.send(Ready(runner.info, tokenizer))
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


def _refuse(frames: Frames[Down], error: JitneyError) -> int:
    frames.send(Refused(type(error).__name__, str(error)))
    return 1


def _read(frames: Frames[Down], engine: Engine) -> None:
    """Hand the front's messages to the engine; without a front end the process at once."""
    try:
        while True:
            message = frames.receive()
            if isinstance(message, Stop):
                engine.stop()
            elif isinstance(message, Submit | Finish | Cancel):
                engine.send(message)
    finally:
        os._exit(0)


def _die_with_parent() -> None:
    """Ask the kernel for SIGKILL at the end of the parent's thread that started this process: a
    step on the device may keep :func:`_read` from its turn."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for whoever owns the front
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


# --------------------------------------------------------------------------- its log


def _log_to(frames: Frames[Down]) -> None:
    log = logging.getLogger("jitney")
    log.setLevel(logging.INFO)
    log.propagate = False
    log.handlers[:] = [_FrontLog(frames)]


class _FrontLog(logging.Handler):
    """Sends log records to the front, which logs them as its own."""

    def __init__(self, frames: Frames[Down]) -> None:
        super().__init__()
        self._frames = frames

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(OSError):
            self._frames.send(Logged(record.name, record.levelno, self.format(record)))


if __name__ == "__main__":
    sys.exit(serve_forks(int(sys.argv[1]), ahead=sys.argv[2:-1], loader=sys.argv[-1]))
