"""The engine's process: loads a model, makes steps until told to stop, and reports.

:mod:`jitney.engine.supervisor` starts a *nursery*, ``python -m jitney.engine.process FD AHEAD…
LOADER``, which imports and calls what is named, seconds of work, and then forks an engine whenever
a socket comes through FD: so a new engine has only the model to load. Nothing of ours may start a
thread or touch a device before the fork. (NumPy's OpenBLAS has threads by then, and sees to them in
a fork.)

The nursery ends when the other end of FD closes, an engine when that of its socket does: whoever
kills the front ends them too.
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
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn

from jitney.config import EngineConfig
from jitney.engine.engine import AdapterPool, Engine
from jitney.engine.grammars import Compile
from jitney.engine.quiet import lean_imports, quiet_imports
from jitney.engine.wire import Down, Frames, Logged, Ready, Refused, Span, Start, StepBegun, Stop
from jitney.errors import DeviceLostError, JitneyError, LoadError
from jitney.execution.protocols import Runner
from jitney.messages import Batch, Cancel, Finish, Submit

_log = logging.getLogger(__name__)

Load = Callable[[EngineConfig, bytes], tuple[Runner, bytes, Compile, AdapterPool | None]]
"""Loads a model, whose tokenizer's data may be given: its runner, the data for the front if they
were not, what compiles grammars, and its adapters if it takes any. The loader that
the nursery is told of does what every load needs, and gives this."""

NUMBER = struct.Struct("<q")
"""How the nursery tells a pid or an exit status (negative: a signal)."""

DEVICE_LOST = 3
"""Exit status: the device failed for good."""

_OOM_SCORE = 500
"""Above the front's: when memory is short, the kernel ends the engine, which is started again."""

_PR_SET_PDEATHSIG = 1


def nurse(descriptor: int, ahead: Sequence[str], loader: str) -> int:
    """Fork an engine for each socket that comes, one at a time, and tell its pid and exit status.
    Returns once nobody asks any more. ``ahead`` may fork processes of its own."""
    _die_with_parent()
    quiet_imports()
    gc.disable()  # what is imported stays: to look for garbage in it takes an eighth of the time
    with lean_imports():
        for name in ahead:
            pkgutil.resolve_name(name)()
    try:
        with lean_imports():
            load: Load = pkgutil.resolve_name(loader)()
    except ImportError:  # a package that is installed here does need what is hidden
        load = pkgutil.resolve_name(loader)()
    gc.freeze()  # else the engine's first collection would copy every page that has an object
    with socket.socket(fileno=descriptor) as control:
        while True:
            asked, sockets, _, _ = socket.recv_fds(control, 1, 1)
            if not asked:
                return 0
            pid = os.fork()
            if pid == 0:
                gc.enable()
                control.close()
                _serve_and_exit(sockets[0], load)
            os.close(sockets[0])
            control.sendall(NUMBER.pack(pid))
            ended = status = 0
            while ended != pid:
                ended, status = os.wait()
            control.sendall(NUMBER.pack(os.waitstatus_to_exitcode(status)))


def _serve_and_exit(descriptor: int, load: Load) -> NoReturn:
    """In the forked process: nothing of the nursery's may run when it ends."""
    status = 1
    try:
        os.set_inheritable(descriptor, False)
        status = serve(descriptor, load)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def serve(descriptor: int, load: Load) -> int:
    """Load a model and make steps until told to stop. Returns the exit status."""
    _die_with_parent()
    frames: Frames[Down] = Frames(socket.socket(fileno=descriptor), Down)
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(str(_OOM_SCORE), encoding="ascii")
    _log_to(frames)
    start = frames.receive()
    assert isinstance(start, Start)
    try:
        runner, tokenizer, compile_grammar, adapters = load(start.config, start.tokenizer)
    except (JitneyError, MemoryError) as error:
        full = LoadError("the model does not fit into memory")
        said = error if isinstance(error, JitneyError) else full
        frames.send(Refused(type(said).__name__, str(said)))
        return 1

    def tell(batches: list[Batch]) -> None:
        spans = (
            Span(row.key, row.index, row.start, row.end) for one in batches for row in one.rows
        )
        frames.send(StepBegun(list(spans)))

    engine = Engine(start.config, runner, time.monotonic, tell, compile_grammar, adapters)
    frames.send(Ready(runner.info, tokenizer))
    threading.Thread(target=_read, args=(frames, engine), name="jitney-inbox", daemon=True).start()
    try:
        engine.run(SimpleNamespace(put=frames.send))
    except DeviceLostError:
        _log.exception("the device is lost")
        return DEVICE_LOST
    except Exception:
        _log.exception("the engine has died")
        return 1
    return 0


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
    sys.exit(nurse(int(sys.argv[1]), sys.argv[2:-1], sys.argv[-1]))
