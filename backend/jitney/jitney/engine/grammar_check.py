"""Checks what requests ask for by ``structured_outputs``, in a process of its own.

Owned by a front; called by the threads that encode. A check may take any time and memory, or crash:
then the process is killed, that grammar is refused, and the next one gets another process.
"""

import contextlib
import os
import select
import subprocess
import threading
from collections import OrderedDict

import msgspec

from jitney.config import EngineConfig
from jitney.engine.fork_server import child_environment, python_executable
from jitney.errors import InternalError, InvalidArgumentError
from jitney.sampling_params import StructuredOutputs

_START_S = 60.0


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
        self._process: subprocess.Popen[bytes] | None = None

    def knows(self, structured: StructuredOutputs) -> bool:
        """Whether :meth:`check` would return at once."""
        return msgspec.json.encode(structured) in self._checked

    def check(self, structured: StructuredOutputs) -> str:
        """The grammar for ``Submit.grammar``. Raises InvalidArgumentError that names what is wrong.
        Takes at most ``grammar_timeout_s`` seconds once the checks before it are over."""
        asked = msgspec.json.encode(structured)
        known = self._checked.get(asked)
        if known is not None:
            # The thread that holds the lock may have evicted it since the line above.
            with contextlib.suppress(KeyError):
                self._checked.move_to_end(asked)
            return known
        with self._lock:
            grammar = self._ask(asked)
            self._checked[asked] = grammar
            while len(self._checked) > self._config.grammar_cache:
                self._checked.popitem(last=False)
        return grammar

    def close(self) -> None:
        """End the process. A check after that would start another one."""
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
            self.close()
            raise InvalidArgumentError(
                "structured_outputs is too complex: its check took more than "
                f"{self._config.grammar_timeout_s:g} s (grammar_timeout_s), or too much memory"
            )
        verdict = msgspec.json.decode(answer, type=dict[str, str])
        if verdict["refusal"]:
            raise InvalidArgumentError(verdict["refusal"])
        return verdict["grammar"]

    def _start(self) -> subprocess.Popen[bytes]:
        """Start a process, in place of one that may have died, and wait until it can check."""
        self.close()
        self._process = subprocess.Popen(
            [python_executable(), "-m", self._module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=child_environment(),
        )
        if _exchange(self._process, self._setup, _START_S) is None:
            self.close()
            raise InternalError("the process that checks grammars does not start")
        return self._process


def _exchange(process: subprocess.Popen[bytes], line: bytes, timeout_s: float) -> bytes | None:
    """Send a line and wait for one. None if nothing comes for ``timeout_s``, or the process has
    ended."""
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(line)
        process.stdin.flush()
    except BrokenPipeError:
        return None
    answer = b""
    poll = select.poll()
    poll.register(process.stdout, select.POLLIN)
    while poll.poll(1000 * timeout_s):
        data = os.read(process.stdout.fileno(), 1 << 20)
        if not data:
            return None  # the process has ended
        answer += data
        if answer.endswith(b"\n"):
            return answer
    return None
