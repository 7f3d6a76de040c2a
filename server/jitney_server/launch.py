"""Starts a server with arguments that only its own user can read, and with large ``stacks``.

Every local user can read the command line of a process, but not its environment. So the secret
arguments are passed as environment variables, and placeholders for them stand on the command line.
The program is stopped before its first instruction. Then its pointers to the placeholders are
changed, so that they point to the values of the variables. The secret is the key of the restricted
endpoints, which two of the server's options hold.

``server`` and the containers' process 1 call :func:`launch`, and then ``group_guard``.
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
from typing import Any, NamedTuple

from jitney_server.stacks import stack_bytes

RESTRICTED = ("shared-memory", "model-repository", "trace", "logging")
"""Endpoints that a client reaches only with the server's random key."""

_LOG = logging.getLogger(__name__)

_PTRACE_DETACH = 17

# What is started first is a small Python program, which then becomes the real one. It is put
# together from the four parts below. Its arguments are:
#
#     argv[1]    the signal that it gets when the thread that has started it ends; 0: none
#     argv[2]    the process id of its launcher
#     argv[3]    bytes of stack for each thread
#     argv[4:]   the real program and its arguments
#
# A function between `fork` and `exec` could do the same. But it would run in a copy of this
# process, where locks of other threads may be held for ever.
#
# The launcher may have ended before the kernel knows of the signal: then this program ends too.
_BIND_TO_PARENT = """
import ctypes, os, sys
PR_SET_PDEATHSIG = 1
ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(sys.argv[1]))
if os.getppid() != int(sys.argv[2]):
    os._exit(98)
"""
# Each new thread gets a stack of the size of the soft limit.
_SET_STACK_LIMIT = """
import resource
hard = resource.getrlimit(resource.RLIMIT_STACK)[1]
resource.setrlimit(resource.RLIMIT_STACK, (int(sys.argv[3]), hard))
"""
# Left out where the system does not allow a process to trace its child.
_ASK_TO_BE_TRACED = """
PTRACE_TRACEME = 0  # a traced process stops after its next exec
if ctypes.CDLL(None).ptrace(PTRACE_TRACEME, 0, None, None) != 0:
    os._exit(99)
"""
_EXEC = """
os.execv(sys.argv[4], sys.argv[4:])
"""
_TRACED = _BIND_TO_PARENT + _SET_STACK_LIMIT + _ASK_TO_BE_TRACED + _EXEC
_UNTRACED = _BIND_TO_PARENT + _SET_STACK_LIMIT + _EXEC
_SIGKILL = "9"
_NO_SIGNAL = "0"


class _Memory(NamedTuple):
    """Addresses in the memory of a program that has not run yet."""

    stack: int
    arguments: int
    arguments_end: int
    variables: int
    variables_end: int


def restrict(key: str) -> list[str]:
    """The server's options that close the endpoints of RESTRICTED to all who do not send the header
    ``jitney-key: KEY``."""
    value = f"{','.join(RESTRICTED)}:jitney-key={key}"
    return [f"--http-restricted-api={value}", f"--grpc-restricted-protocol={value}"]


def launch(
    command: Sequence[str], secret: Sequence[str], environment: Mapping[str, str], **options: Any
) -> subprocess.Popen[bytes]:
    """Start ``command`` with the arguments ``secret`` at its end. ``options`` are those of Popen.

    If the main thread calls this, the program is killed when this process ends, however it ends.

    Some systems do not let a process trace its child (some containers). There the secret arguments
    stand on the command line, and a warning says so.
    """
    # The kernel's signal comes when the calling thread ends. A thread other than the main one may
    # end long before this process, and then the program must go on.
    is_main_thread = threading.current_thread() is threading.main_thread()
    end_signal = _SIGKILL if is_main_thread else _NO_SIGNAL
    process = _launch_hidden(command, secret, environment, end_signal, options)
    if process is not None:
        return process
    if secret:
        _LOG.warning("the key of the server's restricted endpoints is visible to every local user")
    program = [*python_program(_UNTRACED), *_first_arguments(end_signal), *command, *secret]
    return subprocess.Popen(program, env=environment, **options)


def _first_arguments(end_signal: str) -> list[str]:
    """argv[1] to argv[3] of the small program."""
    return [end_signal, str(os.getpid()), str(stack_bytes())]


def python_program(code: str) -> list[str]:
    """The command that runs a small program, which needs the standard library alone."""
    return [sys.executable, "-I", "-S", "-c", code]


def _launch_hidden(
    command: Sequence[str],
    secret: Sequence[str],
    environment: Mapping[str, str],
    end_signal: str,
    options: Mapping[str, Any],
) -> subprocess.Popen[bytes] | None:
    """Start the program with hidden arguments. None: this system does not allow it."""
    names = [f"JITNEY_ARGUMENT_{number}" for number in range(len(secret))]
    program = [*python_program(_TRACED), *_first_arguments(end_signal), *command, *names]
    variables = {**environment, **dict(zip(names, secret, strict=True))}
    process = subprocess.Popen(program, env=variables, **options)
    try:
        status = os.waitpid(process.pid, 0)[1]
        if os.WIFSTOPPED(status):
            _redirect_arguments(process.pid, names)
            ctypes.CDLL(None).ptrace(_PTRACE_DETACH, process.pid, None, None)
            return process
    except (OSError, ValueError) as error:  # ValueError: the memory does not look as expected
        _LOG.debug("arguments cannot be hidden: %r", error)
    except BaseException:
        process.kill()
        raise
    process.kill()
    process.wait()
    return None


def _redirect_arguments(pid: int, names: Sequence[str]) -> None:
    """Let each argument in ``names`` point to the value of the environment variable of that name.
    The program has not run yet. Raises OSError and ValueError."""
    memory = _read_layout(pid)
    with open(f"/proc/{pid}/mem", "r+b", buffering=0) as file:
        descriptor = file.fileno()
        arguments = _read(descriptor, memory.arguments, memory.arguments_end)
        variables = _read(descriptor, memory.variables, memory.variables_end)
        # The stack begins with the number of arguments and the pointers to them.
        stack = _read(descriptor, memory.stack, memory.arguments)
        for name in names:
            argument = memory.arguments + _find_text(arguments, f"{name}\0")
            variable = memory.variables + _find_text(variables, f"{name}=")
            value = variable + len(f"{name}=")
            pointer = memory.stack + stack.index(struct.pack("@P", argument))
            os.pwrite(descriptor, struct.pack("@P", value), pointer)


def _read_layout(pid: int) -> _Memory:
    # The program's name, in parentheses, may hold spaces. So the fields are counted from its end.
    stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    fields = [int(field) for field in stat.rpartition(")")[2].split()[1:]]
    # ``fields[0]`` is field 4 of proc_pid_stat(5).
    return _Memory(
        stack=fields[28 - 4],  # startstack
        arguments=fields[48 - 4],  # arg_start
        arguments_end=fields[49 - 4],  # arg_end
        variables=fields[50 - 4],  # env_start
        variables_end=fields[51 - 4],  # env_end
    )


def _read(descriptor: int, begin: int, end: int) -> bytes:
    return os.pread(descriptor, end - begin, begin)


def _find_text(texts: bytes, beginning: str) -> int:
    """The index of the text that begins with ``beginning``. Each of ``texts`` ends in a zero byte.
    Raises ValueError if there is none."""
    # A text begins behind the zero byte that ends the one before it. A zero byte is put before the
    # first text too. So in `padded`, the zero byte before a text has the index that the text itself
    # has in `texts`.
    padded = b"\0" + texts
    return padded.index(f"\0{beginning}".encode())
