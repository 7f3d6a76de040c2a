"""The processes of an engine, as its front sees them: the fork server, and an engine it has forked.

Used by the supervisor's thread; :meth:`EngineConnection.send` by any thread. What runs in these
processes is in :mod:`jitney.engine.process`.
"""

import contextlib
import os
import queue
import select
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import entry_points

from jitney.engine.child_process import child_environment, python_executable
from jitney.engine.process import DEVICE_LOST, NUMBER
from jitney.engine.wire import Frames, Start, ToEngine, ToFront

TICK_S = 0.5
"""Longest wait for a process before other things are looked at."""
_MOST_ENDING_S = 10.0
"""Longest wait for the exit status of an engine that has ended or was killed. A call of the
device's driver may delay its end, or the fork server may be stopped: both are left behind then."""

CAUSES = ("killed", "device_lost", "failed", "hung")
"""Why an engine ended, in this order: a signal ended it; its device failed; it ended in another
way; it made no progress, and the front killed it for that."""

AHEAD = "jitney.ahead"
"""Group of entry points that the fork server calls before its long imports. They start processes
that compile kernels meanwhile."""

LOADER = "jitney.engine.assemble:prepare"
"""Returns the function that loads a model."""


@dataclass(frozen=True, slots=True)
class ForkPlan:
    """Names of the functions that the fork server calls before it forks."""

    loader: str = LOADER
    """Returns a :data:`~jitney.engine.loading.LoadModel`."""
    ahead: tuple[str, ...] = ()
    """Called before the loader is imported. They prepare something."""


def default_plan() -> ForkPlan:
    """The real loader, and all entry points that prepare something."""
    ahead = sorted(found.value for found in entry_points(group=AHEAD))
    return ForkPlan(ahead=tuple(ahead))


@dataclass(frozen=True, slots=True)
class ProcessEnd:
    """How an engine's process has ended."""

    status: int
    """Exit status; negative: the signal that ended it."""
    with_fork_server: bool
    """The fork server has ended first, and the engine with it: ``status`` is the fork server's."""
    killed_for: str | None = None
    """Why this process has killed it: one of ``CAUSES``. None: it has not."""

    @property
    def cause(self) -> str:
        """One of ``CAUSES``."""
        if self.killed_for is not None:
            return self.killed_for
        if self.status < 0:
            return "killed"
        if self.status == DEVICE_LOST:
            return "device_lost"
        return "failed"

    @property
    def is_from_elsewhere(self) -> bool:
        """Whether somebody else has killed it, by a signal that is sent to processes. A fault of
        its own gives another one, such as SIGSEGV."""
        return self.killed_for is None and self.status in (-signal.SIGKILL, -signal.SIGTERM)

    @property
    def is_of_fork_server(self) -> bool:
        """Whether the engine ended only because the fork server did."""
        return self.killed_for is None and self.with_fork_server


@dataclass(frozen=True, slots=True)
class ForkedEngine:
    """An engine's process that was just forked."""

    pid: int | None
    """None: the fork server has died, and forked no engine."""
    connection: socket.socket
    """To the engine. If no engine was forked, nobody holds the other end: reading from it gives an
    end of file at once."""


class ForkServer:
    """The process that engines are forked from. Started when it is first needed, and again when it
    has died."""

    def __init__(self, plan: ForkPlan, stopped: threading.Event) -> None:
        """Once ``stopped`` is set, a call of :meth:`fork` or :meth:`wait` that still waits for the
        fork server kills it."""
        self._plan = plan
        self._stopped = stopped
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        # The kernel kills a fork server when the thread that started it ends (PR_SET_PDEATHSIG). So
        # it is started by a thread that lives as long as this object.
        self._starter = ThreadPoolExecutor(1, "jitney-fork-server-starter")

    @property
    def pid(self) -> int | None:
        """Of its process. None: it was never started."""
        return None if self._process is None else self._process.pid

    def fork(self, tick: Callable[[], None]) -> ForkedEngine:
        """Fork a new engine. ``tick`` is called every ``TICK_S`` while the fork server gets ready.
        If it raises, the fork server is killed."""
        if self._process is None or self._process.poll() is not None:
            self._start()
        assert self._control is not None
        ours, theirs = socket.socketpair()
        with theirs:
            # An OSError means that the fork server has just died: then no pid comes either.
            with contextlib.suppress(OSError):
                socket.send_fds(self._control, [b"+"], [theirs.fileno()])
            try:
                # Of the two numbers that the fork server sends for an engine, this is the first.
                return ForkedEngine(pid=self._receive(tick), connection=ours)
            except BaseException:
                ours.close()
                raise

    def wait(self, tick: Callable[[], None]) -> ProcessEnd:
        """Wait until the engine that was forked last has ended; if that takes too long, kill the
        fork server instead. ``tick`` is called every ``TICK_S``."""
        give_up_at = time.monotonic() + _MOST_ENDING_S
        is_given_up = False

        def tick_until_given_up() -> None:
            nonlocal is_given_up
            tick()
            if time.monotonic() > give_up_at:
                is_given_up = True
                assert self._process is not None
                self._process.kill()

        status = self._receive(tick_until_given_up)  # the second number
        if status is not None:
            return ProcessEnd(status, with_fork_server=False)
        # The fork server has died, and its engine with it.
        assert self._process is not None
        status = self._process.wait()
        killed_for = "hung" if is_given_up else None
        return ProcessEnd(status, with_fork_server=True, killed_for=killed_for)

    def close(self) -> None:
        """End it and wait until it has ended."""
        if self._process is not None:
            assert self._control is not None
            self._control.close()
            self._process.kill()
            self._process.wait()
        self._starter.shutdown(wait=False)

    def _start(self) -> None:
        if self._control is not None:
            self._control.close()
        self._control, theirs = socket.socketpair()
        with theirs:
            self._process = self._starter.submit(self._spawn, theirs.fileno()).result()

    def _spawn(self, descriptor: int) -> subprocess.Popen[bytes]:
        environment = child_environment()
        # Torch is asked whether there is a GPU. Without this, the question itself would begin to
        # use the GPU, and a forked process cannot use it any more.
        environment["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
        # For matrix products, oneDNN prepares code for each number of rows and caches it. Torch's
        # binding to oneDNN has a cache of its own. At their usual sizes these caches take 120 MB of
        # heap and make nothing faster.
        for name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
            environment.setdefault(name, "16")
        # A program that stops a server may signal all of its processes, as tritonserver does. But
        # the front decides when its engine ends. So the present thread blocks these signals, and a
        # child inherits that.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
        command = [python_executable(), "-X", "faulthandler", "-m", "jitney.engine.process"]
        return subprocess.Popen(
            [*command, str(descriptor), *self._plan.ahead, self._plan.loader],
            pass_fds=[descriptor],
            stdin=subprocess.DEVNULL,
            env=environment,
        )

    def _receive(self, tick: Callable[[], None]) -> int | None:
        """The next number that the fork server sends; None if it has died."""
        assert self._control is not None
        assert self._process is not None
        poll = select.poll()
        poll.register(self._control, select.POLLIN)
        while not poll.poll(1000 * TICK_S):
            if self._stopped.is_set():
                self._process.kill()
            try:
                tick()
            except BaseException:
                self._process.kill()
                raise
        try:
            data = self._control.recv(NUMBER.size, socket.MSG_WAITALL)
        except ConnectionResetError:  # it died before it read the request
            return None
        if len(data) < NUMBER.size:
            return None
        (number,) = NUMBER.unpack(data)
        return int(number)


def _do_nothing() -> None:
    """Nothing is due while a process ends."""


class EngineConnection:
    """An engine's process, and the socket to it. A thread writes to the socket. So no caller of
    :meth:`send` waits for a process that hangs."""

    def __init__(self, fork_server: ForkServer, start: Start, tick: Callable[[], None]) -> None:
        """``tick`` is as in :meth:`ForkServer.fork`."""
        self._fork_server = fork_server
        forked = fork_server.fork(tick)
        self.pid = forked.pid
        self.frames: Frames[ToFront] = Frames(forked.connection, ToFront)
        self._outgoing: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._end: ProcessEnd | None = None  # once it has ended
        self.send(start)
        threading.Thread(target=self._write, name="jitney-engine-writer", daemon=True).start()

    def send(self, message: ToEngine) -> None:
        """Queue a message. Never blocks."""
        self._outgoing.put(self.frames.pack(message))

    def kill(self) -> None:
        """End the process now. What it has sent can still be received."""
        if self.pid is not None and self._end is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def close(self, tick: Callable[[], None] = _do_nothing) -> ProcessEnd:
        """End the process, if it has not ended, and close the socket. Returns how it ended.
        ``tick`` is called every ``TICK_S`` meanwhile."""
        if self._end is None:
            self.kill()
            self._end = self._fork_server.wait(tick)
            self._outgoing.put(None)
            self.frames.close()
        return self._end

    def _write(self) -> None:
        with contextlib.suppress(OSError):  # the engine has died: the reader finds out and acts
            while True:
                frame = self._outgoing.get()
                if frame is None:
                    return
                self.frames.send_packed(frame)
