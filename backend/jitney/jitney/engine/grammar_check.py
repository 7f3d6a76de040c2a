"""Checks what requests ask for by ``structured_outputs``, in a process of its own.

Owned by a front; called by the threads that encode. A check may take any time and memory, or crash:
then the process is killed, that grammar is refused, and the next one gets another process.
"""

import contextlib
import os
import select
import subprocess
import threading
import time
from collections import OrderedDict

import msgspec

from jitney.config import EngineConfig
from jitney.engine.child_process import child_environment, python_executable
from jitney.engine.inbox import UNLOADED
from jitney.errors import InternalError, InvalidArgumentError, UnavailableError
from jitney.sampling_params import StructuredOutputs

_START_S = 60.0
"""Seconds that a process has to import what it needs and to read the tokenizer."""


class _Answer(msgspec.Struct, frozen=True):
    """A line from the process, written by ``text.grammar_process``, which runs there. One of the
    two is set: the grammar, or the reason for a refusal."""

    grammar: str = ""
    refusal: str = ""


class GrammarChecker:
    """Starts its process for the first check, and keeps the grammars that were asked for last."""

    def __init__(self, config: EngineConfig, module: str, setup: bytes) -> None:
        """``module`` is what the process runs, ``setup`` the first line that it reads. It answers
        each line with a line."""
        self._config = config
        self._module = module
        self._setup = setup
        # structured_outputs as JSON -> its grammar; the one used longest ago comes first. Read
        # without the lock, so that a known grammar waits for no check.
        self._checked: OrderedDict[bytes, str] = OrderedDict()
        # Held by the thread that talks to the process, and adds to _checked.
        self._lock = threading.Lock()
        # Guards the next two. Never held for long, so close() can kill a process that is at work.
        self._process_lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._is_closed = False

    def knows(self, structured: StructuredOutputs) -> bool:
        """Whether :meth:`check` would return at once."""
        return msgspec.json.encode(structured) in self._checked

    def check(self, structured: StructuredOutputs) -> str:
        """The grammar for ``Submit.grammar``. Raises InvalidArgumentError that names what is wrong,
        and UnavailableError after :meth:`close`.

        Takes at most ``grammar_timeout_s`` seconds once the checks before it are over. If a process
        must be started first, that may take ``_START_S`` seconds more."""
        asked = msgspec.json.encode(structured)
        known = self._find(asked)
        if known is not None:
            return known
        with self._lock:
            # While this thread waited for the lock, another one may have checked the same.
            known = self._find(asked)
            if known is not None:
                return known
            grammar = self._ask(asked)
            self._checked[asked] = grammar
            while len(self._checked) > self._config.grammar_cache:
                self._checked.popitem(last=False)
        return grammar

    def close(self) -> None:
        """End the process, and refuse all further checks."""
        with self._process_lock:
            self._is_closed = True
            if self._process is not None:
                self._process.kill()  # so a check that is at work ends at once
        with self._lock:
            self._end_process()

    def _find(self, asked: bytes) -> str | None:
        """A grammar that has been checked, which is now the one used last; None if it is not kept.
        Called with or without the lock."""
        known = self._checked.get(asked)
        if known is not None:
            # Without the lock: the thread that holds it may have evicted it since the line above.
            with contextlib.suppress(KeyError):
                self._checked.move_to_end(asked)
        return known

    def _end_process(self) -> None:
        with self._process_lock:
            process = self._process
            self._process = None
        if process is not None:
            process.kill()
            process.communicate()

    def _ask(self, asked: bytes) -> str:
        """Have the process check it, and return its grammar. Called under the lock."""
        process = self._process
        if process is None or process.poll() is not None:
            process = self._start()
        answer = _exchange(process, asked + b"\n", self._config.grammar_timeout_s)
        if answer is None:
            self._end_process()
            if self._is_closed:  # close() has killed it
                raise UnavailableError(UNLOADED)
            raise InvalidArgumentError(
                "structured_outputs is too complex: its check took more than "
                f"{self._config.grammar_timeout_s:g} s (grammar_timeout_s), or too much memory"
            )
        answered = msgspec.json.decode(answer, type=_Answer)
        if answered.refusal:
            raise InvalidArgumentError(answered.refusal)
        return answered.grammar

    def _start(self) -> subprocess.Popen[bytes]:
        """Start a process, in place of one that may have died, and wait until it can check."""
        self._end_process()
        with self._process_lock:
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
        if _exchange(process, self._setup, _START_S) is None:
            self._end_process()
            if self._is_closed:
                raise UnavailableError(UNLOADED)
            raise InternalError("the process that checks grammars does not start")
        return process


def _exchange(process: subprocess.Popen[bytes], line: bytes, timeout_s: float) -> bytes | None:
    """Send a line and wait for one. None if that takes more than ``timeout_s`` in all, or if the
    process has ended."""
    assert process.stdin is not None
    assert process.stdout is not None
    deadline = time.monotonic() + timeout_s
    try:
        if not _write(process.stdin.fileno(), line, deadline):
            return None
    except BrokenPipeError:  # it has ended
        return None
    return _read_line(process.stdout.fileno(), deadline)


def _write(descriptor: int, line: bytes, deadline: float) -> bool:
    """Write a line to a pipe. False if that could not be done until ``deadline``, because the
    process does not read. Raises BrokenPipeError if it has ended."""
    os.set_blocking(descriptor, False)
    rest = memoryview(line)
    while rest:
        if not _wait_for(descriptor, select.POLLOUT, deadline):
            return False
        written = os.write(descriptor, rest)
        rest = rest[written:]
    return True


def _read_line(descriptor: int, deadline: float) -> bytes | None:
    """Read a line from a pipe. None if none comes until ``deadline``, or the process has ended."""
    line = b""
    while not line.endswith(b"\n"):
        if not _wait_for(descriptor, select.POLLIN, deadline):
            return None
        data = os.read(descriptor, 1 << 20)
        if not data:
            return None
        line += data
    return line


def _wait_for(descriptor: int, event: int, deadline: float) -> bool:
    """Whether a pipe can be read or written before ``deadline``."""
    poll = select.poll()
    poll.register(descriptor, event)
    left_s = max(deadline - time.monotonic(), 0.0)
    return bool(poll.poll(1000 * left_s))
