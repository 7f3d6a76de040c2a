"""Starts a program with arguments that only its own user can read.

Every local user can read a command line, but not an environment. So the secret arguments are handed
over as variables, and placeholders stand on the command line. The program is stopped before its
first instruction, and its pointers to the placeholders are turned to the variables. ``server`` and
the containers' process 1 start the server so: its options carry the key of restricted endpoints.
"""

import ctypes
import logging
import os
import struct
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

RESTRICTED = ("shared-memory", "model-repository", "trace", "logging")
"""Endpoints that a client reaches only with the server's random key."""

_LOG = logging.getLogger(__name__)

_PTRACE_DETACH = 17
_NOT_ALLOWED = 99
# The kernel kills (9) the program when the thread ends that started it, however it does; 0: never.
# A process that asks to be traced (request 0) stops after its next exec. Not a function that runs
# between fork and exec in this process: its other threads may hold locks.
_BOUND = "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, int(sys.argv[1]))"
_EXEC = "os.execv(sys.argv[2], sys.argv[2:])"
_TRACED = f"""{_BOUND}
ctypes.CDLL(None).ptrace(0, 0, None, None) == 0 or os._exit({_NOT_ALLOWED})
{_EXEC}"""
# Positions in /proc/PID/stat behind the name: where the stack starts, and the bounds of the command
# line and of the environment.
_START_STACK = 25
_ARG_START = 45
_ENV_END = 49


def restrict(key: str) -> list[str]:
    """The server's options that close the endpoints of RESTRICTED to all who do not send the header
    ``jitney-key: KEY``."""
    closed = f"{','.join(RESTRICTED)}:jitney-key={key}"
    return [f"--http-restricted-api={closed}", f"--grpc-restricted-protocol={closed}"]


def launch(
    command: Sequence[str], secret: Sequence[str], environment: Mapping[str, str], **options: Any
) -> subprocess.Popen[bytes]:
    """Start ``command`` with the arguments ``secret`` at its end; ``options`` are Popen's.
    Called in the main thread, it binds the program to the life of this process.

    Where the system does not allow to look into a child (a container may forbid it), the program is
    started with the arguments in the open, and a warning is logged.
    """
    names = [f"JITNEY_ARGUMENT_{number}" for number in range(len(secret))]
    is_main = threading.current_thread() is threading.main_thread()
    python = [sys.executable, "-I", "-S", "-c"]
    bound = "9" if is_main else "0"
    program = [*python, _TRACED, bound, *command, *names]
    hidden = {**environment, **dict(zip(names, secret, strict=True))}
    process = subprocess.Popen(program, env=hidden, **options)
    try:
        if os.WIFSTOPPED(os.waitpid(process.pid, 0)[1]):
            _redirect(process.pid, names)
            ctypes.CDLL(None).ptrace(_PTRACE_DETACH, process.pid, None, None)
            return process
    except (OSError, ValueError) as error:  # a system that keeps these things elsewhere
        _LOG.debug("arguments cannot be hidden: %r", error)
    except BaseException:
        process.kill()
        raise
    process.kill()
    process.wait()
    _LOG.warning("the key of the server's restricted endpoints is visible to every local user")
    program = [*python, f"{_BOUND}; {_EXEC}", bound, *command, *secret]
    return subprocess.Popen(program, env=environment, **options)


def _redirect(pid: int, names: Sequence[str]) -> None:
    """Point the arguments ``names`` of a program that has not run yet to the values of the
    variables of those names."""
    stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    stack = int(stat[_START_STACK])
    bounds = [int(each) for each in stat[_ARG_START:_ENV_END]]
    argument_start, argument_end, variable_start, variable_end = bounds
    with open(f"/proc/{pid}/mem", "r+b", buffering=0) as file:
        memory = file.fileno()
        arguments = b"\0" + os.pread(memory, argument_end - argument_start, argument_start)
        variables = b"\0" + os.pread(memory, variable_end - variable_start, variable_start)
        pointers = os.pread(
            memory, argument_start - stack, stack
        )  # argc, argv, the environment's, …
        for name in names:
            argument = argument_start + arguments.index(f"\0{name}\0".encode())
            value = variable_start + variables.index(f"\0{name}=".encode()) + len(name) + 1
            pointer = stack + pointers.index(struct.pack("@P", argument))
            os.pwrite(memory, struct.pack("@P", value), pointer)
