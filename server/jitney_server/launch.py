"""Starts a server with arguments that only its own user can read, and with large stacks.

Every local user can read the command line of a process, but not its environment. So the secret
arguments are passed as environment variables, and placeholders for them stand on the command line.
The program is stopped before its first instruction. Then its pointers to the placeholders are
changed, so that they point to the values of the variables. The secret is the key of the restricted
endpoints, which two of the server's options hold.

Large stacks: the server's HTTP library copies the whole body of some requests onto the stack of a
thread. With a usual stack, a large body ends the server.

``server`` and the containers' process 1 call :func:`launch`.
"""

import ctypes
import logging
import os
import resource
import struct
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

RESTRICTED = ("shared-memory", "model-repository", "trace", "logging")
"""Endpoints that a client reaches only with the server's random key."""

STACK_BYTES = 128 << 20
"""Stack of each of the server's threads, if this process's hard limit allows it.

A form takes twice its length of the stack. JSON takes 67 to 134 bytes for each level of nesting.
Memory is used only as far as a thread uses its stack. It is not larger still, because the kernel
keeps so much of the address space free for the stack: much more would move everything else."""
_STACK_BYTES_IF_COUNTED = 8 << 20
"""The same on a system where a stack counts as memory in use, whether it is used or not."""
_OVERCOMMIT = Path("/proc/sys/vm/overcommit_memory")
_NO_OVERCOMMIT = "2"
"""In that file: memory counts as used as soon as it is asked for."""

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
# The guard of a server, whose process id is argv[1], is another small program. It does two things.
#
# It kills what is left of the server's process group when the server has ended. Stubs may be left
# if the server was killed, alone or with its launcher: they look for their server themselves, but
# may wait for ever for a lock in shared memory that the server held.
#
# And it sets the server's limit of the stack back to the usual argv[2] bytes, so that stubs and
# engines, which inherit it, have usual stacks. It does so when the server has a second thread. At
# that time the server's C library has read the large limit, and goes on using it; and no stub has
# been started yet.
_GUARD = """
import os, resource, select, signal, sys
server = int(sys.argv[1])
usual_stack = int(sys.argv[2])
try:
    # The launcher waits for this process to end. Until then it does not collect the server, so the
    # id cannot be another process's.
    ended = os.pidfd_open(server)
except ProcessLookupError:
    ended = None
# This process ends here, and its child is the guard. So the launcher need not collect the guard.
if os.fork() != 0:
    os._exit(0)
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)

def set_stack_back():
    hard = resource.prlimit(server, resource.RLIMIT_STACK)[1]
    resource.prlimit(server, resource.RLIMIT_STACK, (usual_stack, hard))

def has_second_thread():
    return len(os.listdir(f"/proc/{server}/task")) > 1

if ended is not None:
    pause = 0.005
    while not select.select([ended], [], [], pause)[0]:
        try:
            if has_second_thread():
                pause = None  # from now on wait for the end alone
                set_stack_back()
        except OSError:
            pass  # the server has ended meanwhile, or this system does not allow it
os.killpg(server, signal.SIGKILL)
"""
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


def guard_group(pid: int) -> None:
    """Start the guard of the server ``pid``, which :func:`launch` has started.

    When the server ends, the guard kills every other process of the server's group, even if this
    process has ended before. It also gives the processes that the server starts stacks of the usual
    size. Needs Linux 5.3 or later; elsewhere nothing happens.
    """
    usual_stack = resource.getrlimit(resource.RLIMIT_STACK)[0]
    subprocess.run(
        [*_python(_GUARD), str(pid), str(usual_stack)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        check=False,
    )


def stack_bytes() -> int:
    """The stack of each thread of a program that :func:`launch` starts, in bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_STACK)
    stack = _STACK_BYTES_IF_COUNTED if _counts_unused_memory() else STACK_BYTES
    # If the user has set a larger limit, it stays. Not "unlimited": the C library would give
    # threads 2 MiB then.
    if soft != resource.RLIM_INFINITY:
        stack = max(stack, soft)
    if hard != resource.RLIM_INFINITY:
        stack = min(stack, hard)
    return stack


def _counts_unused_memory() -> bool:
    """Whether memory counts as used as soon as it is asked for."""
    if resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY:
        return True
    try:
        return _OVERCOMMIT.read_text(encoding="ascii").strip() == _NO_OVERCOMMIT
    except OSError:
        return False


def unshielded() -> str:
    """The requests that still end a server that :func:`launch` has started, if no proxy stands
    before it. Measured with tritonserver 2.51."""
    stack = stack_bytes()
    return (
        f"a form (application/x-www-form-urlencoded) of over {stack // 2 >> 20} MiB, or JSON "
        f"nested more than {stack // 134:,} deep, may end this server"
    )


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
    program = [*_python(_UNTRACED), *_first_arguments(end_signal), *command, *secret]
    return subprocess.Popen(program, env=environment, **options)


def _first_arguments(end_signal: str) -> list[str]:
    """argv[1] to argv[3] of the small program."""
    return [end_signal, str(os.getpid()), str(stack_bytes())]


def _python(code: str) -> list[str]:
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
    program = [*_python(_TRACED), *_first_arguments(end_signal), *command, *names]
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
