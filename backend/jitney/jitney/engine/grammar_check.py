"""Checks what requests ask for by ``structured_outputs``, in processes of their own.

Owned by a front; called by the threads that encode. A check may take any time and memory, or crash:
then the process is killed, that grammar is refused, and the next one gets another process.
"""

import os
import select
import signal
import subprocess
import threading
import time
from collections import OrderedDict
from copy import copy

import msgspec

from jitney.config import EngineConfig
from jitney.engine.child_process import child_environment, python_executable
from jitney.engine.inbox import UNLOADED
from jitney.engine.load_watch import ticks_of
from jitney.errors import InternalError, InvalidArgumentError, UnavailableError
from jitney.sampling_params import StructuredOutputs

NUM_PROCESSES = 2
"""With one process, a check that takes long would delay all others."""
_START_S = 60.0
"""Seconds of processor time that the start of a process may take: it imports what it needs, and
reads the tokenizer."""
_MOST_SLOWDOWN = 20
"""For each second of processor time that a process may use, it may take so many seconds by the
clock: on a busy machine it does not run all the time."""
_LOOK_S = 0.1
"""Seconds between two looks at the processor time of a process."""


class _Answer(msgspec.Struct, frozen=True):
    """A line from the process, written by ``text.grammar_process``, which runs there. One of the
    two is set: the grammar, or the reason for a refusal."""

    grammar: str = ""
    refusal: str = ""


class _StuckError(Exception):
    """A process gives no answer. ``is_too_complex``: because of what it was asked."""

    def __init__(self, *, is_too_complex: bool) -> None:
        super().__init__()
        self.is_too_complex = is_too_complex


class GrammarChecker:
    """Keeps the verdicts on what was asked for last. Starts a process when it is first needed."""

    def __init__(self, config: EngineConfig, module: str, setup: bytes) -> None:
        """``module`` is what a process runs, ``setup`` the first line that it reads. It answers
        each line with a line."""
        self._most_kept = config.grammar_cache
        self._changed = threading.Condition()  # its lock guards the next four
        # structured_outputs as JSON -> its grammar, or why it is refused; the one that was used
        # longest ago comes first. The refusals are kept apart, so that many of them evict no
        # grammar.
        self._grammars: OrderedDict[bytes, str] = OrderedDict()
        self._refusals: OrderedDict[bytes, InvalidArgumentError] = OrderedDict()
        self._in_progress: set[bytes] = set()
        self._processes = [
            _Process(module, setup, config.grammar_timeout_s) for _ in range(NUM_PROCESSES)
        ]
        self._idle = self._processes.copy()

    def knows(self, structured: StructuredOutputs) -> bool:
        """Whether :meth:`check` would return at once. Without the lock: each of the two look-ups is
        one operation of a dictionary, and the answer may be old as soon as it is given."""
        return self._is_known(msgspec.json.encode(structured))

    def _is_known(self, asked: bytes) -> bool:
        return asked in self._grammars or asked in self._refusals

    def check(self, structured: StructuredOutputs) -> str:
        """The grammar for ``Submit.grammar``. Raises InvalidArgumentError that names what is wrong,
        and UnavailableError after :meth:`close`, or if the process is stopped or killed from
        outside.

        Once a process is free, a check takes at most ``grammar_timeout_s`` seconds of its processor
        time. If the process must be started first, the start takes at most ``_START_S`` more."""
        verdict = self._verdict_on(msgspec.json.encode(structured))
        if isinstance(verdict, InvalidArgumentError):
            # A copy: this one is kept, and each raise would lengthen its traceback, whose frames
            # would stay alive with it.
            raise copy(verdict)
        return verdict

    def close(self) -> None:
        """End the processes, and refuse all further checks."""
        for process in self._processes:
            process.close()

    def _verdict_on(self, asked: bytes) -> str | InvalidArgumentError:
        """The verdict that is kept, or that of a check now."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_known(asked) or self._may_begin(asked))
            verdict = self._find(asked)
            if verdict is not None:
                return verdict
            self._in_progress.add(asked)
            process = self._idle.pop()
        return self._check_in(process, asked)

    def _may_begin(self, asked: bytes) -> bool:
        """Whether a process is free, and none is checking the same."""
        return bool(self._idle) and asked not in self._in_progress

    def _find(self, asked: bytes) -> str | InvalidArgumentError | None:
        """The verdict that is kept, which is now the one used last. Called under the lock."""
        if asked in self._grammars:
            self._grammars.move_to_end(asked)
            return self._grammars[asked]
        if asked in self._refusals:
            self._refusals.move_to_end(asked)
            return self._refusals[asked]
        return None

    def _check_in(self, process: "_Process", asked: bytes) -> str | InvalidArgumentError:
        """Have a process check it, and keep the verdict. An error that is no verdict, because it
        says nothing about the grammar, is raised and not kept."""
        verdict: str | InvalidArgumentError | None = None
        try:
            verdict = process.check(asked)
        finally:
            with self._changed:
                self._idle.append(process)
                self._in_progress.discard(asked)
                if isinstance(verdict, InvalidArgumentError):
                    self._refusals[asked] = verdict
                elif verdict is not None:
                    self._grammars[asked] = verdict
                for kept in (self._grammars, self._refusals):
                    while len(kept) > self._most_kept:
                        kept.popitem(last=False)
                self._changed.notify_all()
        return verdict


class _Process:
    """A process that checks one grammar at a time. It is started when it is needed, and replaced
    when it has died. One thread at a time calls :meth:`check`, any thread :meth:`close`."""

    def __init__(self, module: str, setup: bytes, timeout_s: float) -> None:
        self._module = module
        self._setup = setup
        self._timeout_s = timeout_s
        self._at_work = threading.Lock()  # held by the thread that talks to the process
        # Guards the next two. Never held for long, so close() can kill a process that is at work.
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._is_closed = False

    def check(self, asked: bytes) -> str | InvalidArgumentError:
        """The grammar, or why it is refused. Raises UnavailableError after :meth:`close`, and
        InternalError if the process does not start."""
        with self._at_work:
            return self._ask(asked)

    def close(self) -> None:
        """End the process, and start no other. A check that is at work ends at once."""
        with self._lock:
            self._is_closed = True
            if self._process is not None:
                self._process.kill()
        with self._at_work:
            self._end()

    def _ask(self, asked: bytes) -> str | InvalidArgumentError:
        verdict = self._ask_once(asked)
        if verdict is None:
            verdict = self._ask_once(asked)
        if verdict is None:
            text = "structured_outputs cannot be checked now: its check was stopped"
            raise UnavailableError(text)
        return verdict

    def _ask_once(self, asked: bytes) -> str | InvalidArgumentError | None:
        """The grammar, or why it is refused. None if somebody has stopped or killed the process:
        that says nothing about the grammar."""
        process = self._process
        if process is None or process.poll() is not None:
            process = self._start()
        try:
            answer = _exchange(process, asked + b"\n", self._timeout_s)
        except _StuckError as stuck:
            self._end()
            if self._is_closed:  # close() has killed it
                raise UnavailableError(UNLOADED) from None
            if not stuck.is_too_complex:
                return None
            return InvalidArgumentError(
                "structured_outputs is too complex: its check took more than "
                f"{self._timeout_s:g} s (grammar_timeout_s), or too much memory"
            )
        answered = msgspec.json.decode(answer, type=_Answer)
        if answered.refusal:
            return InvalidArgumentError(answered.refusal)
        return answered.grammar

    def _end(self) -> None:
        with self._lock:
            process = self._process
            self._process = None
        if process is not None:
            process.kill()
            process.communicate()

    def _start(self) -> subprocess.Popen[bytes]:
        """Start a process, in place of one that may have died, and wait until it can check."""
        self._end()
        with self._lock:
            if self._is_closed:
                raise UnavailableError(UNLOADED)
            process = subprocess.Popen(
                [python_executable(), "-m", self._module],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=child_environment(),
                bufsize=0,
            )
            self._process = process
        try:
            _exchange(process, self._setup, _START_S)
        except _StuckError:
            self._end()
            if self._is_closed:
                raise UnavailableError(UNLOADED) from None
            raise InternalError("the process that checks grammars does not start") from None
        return process


class _Limits:
    """How long a process may work at an answer. Its processor time counts: on a busy machine the
    same work takes longer by the clock."""

    def __init__(self, process: subprocess.Popen[bytes], seconds: float) -> None:
        self._process = process
        self._seconds = seconds
        self._used_before = seconds_of(process.pid)
        self._used = self._used_before
        self._progress_at = time.monotonic()
        self._ends_at = self._progress_at + _MOST_SLOWDOWN * seconds

    def wait_for(self, descriptor: int, event: int) -> None:
        """Wait until a pipe can be read or written. Raises _StuckError if the process uses more
        than ``seconds`` of processor time before that, or uses none for ``seconds`` by the clock,
        or takes ``_MOST_SLOWDOWN * seconds`` by the clock."""
        poll = select.poll()
        poll.register(descriptor, event)
        while not poll.poll(1000 * _LOOK_S):
            self._check()

    def _check(self) -> None:
        used = seconds_of(self._process.pid)
        now = time.monotonic()
        if used > self._used:
            self._used = used
            self._progress_at = now
        if used - self._used_before > self._seconds:
            raise _StuckError(is_too_complex=True)
        if now - self._progress_at > self._seconds or now > self._ends_at:
            raise _StuckError(is_too_complex=False)

    def ended(self) -> _StuckError:
        """The error for a process that has ended by itself: for want of memory, or by a fault in
        native code. If it was killed from outside, that is not due to what it was asked."""
        status = self._process.wait()
        is_killed = status in (-signal.SIGKILL, -signal.SIGTERM)
        return _StuckError(is_too_complex=not is_killed)


def seconds_of(pid: int) -> float:
    """Processor time of a process, in seconds; 0 if it has ended."""
    return ticks_of(pid) / os.sysconf("SC_CLK_TCK")


def _exchange(process: subprocess.Popen[bytes], line: bytes, seconds: float) -> bytes:
    """Send a line and wait for one. Raises _StuckError if that takes more than ``seconds`` (see
    :class:`_Limits`), or if the process has ended."""
    assert process.stdin is not None
    assert process.stdout is not None
    limits = _Limits(process, seconds)
    try:
        _write(process.stdin.fileno(), line, limits)
    except BrokenPipeError:
        raise limits.ended() from None
    return _read_line(process.stdout.fileno(), limits)


def _write(descriptor: int, line: bytes, limits: _Limits) -> None:
    """Write a line to a pipe. Raises BrokenPipeError if the process has ended."""
    os.set_blocking(descriptor, False)
    rest = memoryview(line)
    while rest:
        limits.wait_for(descriptor, select.POLLOUT)
        written = os.write(descriptor, rest)
        rest = rest[written:]


def _read_line(descriptor: int, limits: _Limits) -> bytes:
    """Read a line from a pipe."""
    line = b""
    while not line.endswith(b"\n"):
        limits.wait_for(descriptor, select.POLLIN)
        data = os.read(descriptor, 1 << 20)
        if not data:
            raise limits.ended()
        line += data
    return line
