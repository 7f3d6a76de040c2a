"""Starts a program with arguments that only its own user can read.

Every local user can read the command line of a process, but not its environment. So the secret
arguments are passed as environment variables, and placeholders for them stand on the command line.
The program is stopped before its first instruction; then its pointers to the placeholders are
changed, and point to the values of the variables.

Its threads get larger stacks than usual: what the server does with some requests needs as much
stack as their bodies are long.

``server`` and the containers' process 1 start the server so: two of its options carry the key of
the restricted endpoints.
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
"""Stack of each thread of a program that is started, if this process's hard limit allows it. The
server needs twice the length of a form for it, and 67 to 134 bytes for each level of nested JSON.
Only what a thread uses takes memory. Larger ones would move what else the kernel maps."""
_STACK_BYTES_IF_COUNTED = 8 << 20
"""The same where a stack counts as used in full."""
_OVERCOMMIT = Path("/proc/sys/vm/overcommit_memory")
_NEVER = "2"

_LOG = logging.getLogger(__name__)

_PTRACE_DETACH = 17

# What is started is a small Python program, put together from the parts below:
#
#     ask the kernel to send us the signal argv[1] once the thread that started us has ended, and
#         end if its process, argv[2], has ended before that
#     set the soft limit of the stack to argv[3] bytes: each new thread gets a stack of that size
#     ask to be traced by it (left out where the system does not allow that)
#     become the real program, which is argv[4], with the arguments that follow it
#
# A function between `fork` and `exec` could do the same. But it would run in a copy of this
# process, where locks of other threads may be held for ever.
_BIND_TO_PARENT = """
import ctypes, os, sys
PR_SET_PDEATHSIG = 1
ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(sys.argv[1]))
if os.getppid() != int(sys.argv[2]):
    os._exit(98)
"""
_SET_STACK_LIMIT = """
import resource
hard = resource.getrlimit(resource.RLIMIT_STACK)[1]
resource.setrlimit(resource.RLIMIT_STACK, (int(sys.argv[3]), hard))
"""
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
# When the server is killed, alone or with this process, its stubs stay. They look for their server
# themselves, but may wait for ever for a lock in shared memory that it held. So another small
# program waits for the server's end, and kills what is left of its group. Its first process ends at
# once, so that the second one is not our child.
#
# It also gives the server its usual limit of the stack back, argv[2] bytes, as soon as there is a
# second thread. The C library has asked for the limit by then, so the server's threads get large
# stacks all the same. But stubs are started later, and they and their engines get usual ones.
_GUARD = """
import os, resource, select, signal, sys
server = int(sys.argv[1])
try:
    # Our parent waits, so it collects no server: the id is still the server's.
    ended = os.pidfd_open(server)
except ProcessLookupError:
    ended = None
if os.fork() != 0:
    os._exit(0)
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
if ended is not None:
    is_lowered = False
    while not select.select([ended], [], [], None if is_lowered else 0.005)[0]:
        try:
            if len(os.listdir(f"/proc/{server}/task")) > 1:
                is_lowered = True
                hard = resource.prlimit(server, resource.RLIMIT_STACK)[1]
                resource.prlimit(server, resource.RLIMIT_STACK, (int(sys.argv[2]), hard))
        except OSError:
            pass  # it has ended meanwhile, or this system does not allow it
os.killpg(server, signal.SIGKILL)
"""
_SIGKILL = "9"
_NO_SIGNAL = "0"


class _Memory(NamedTuple):
    """Where things begin and end in the memory of a program that has not run yet."""

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
    """See to it that every process of the group that ``pid`` leads ends with ``pid``, even if this
    process is gone by then; and that what ``pid``, started by :func:`launch`, starts has no larger
    stacks than this process. Needs Linux 5.3 or later; elsewhere nothing happens."""
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
    """The stack of each thread of a program that :func:`launch` starts."""
    soft, hard = resource.getrlimit(resource.RLIMIT_STACK)
    wanted = _STACK_BYTES_IF_COUNTED if _counts_all_memory() else STACK_BYTES
    # A soft limit of "unlimited" would give threads 2 MiB.
    largest = wanted if soft == resource.RLIM_INFINITY else max(soft, wanted)
    return largest if hard == resource.RLIM_INFINITY else min(largest, hard)


def _counts_all_memory() -> bool:
    """Whether memory that is asked for counts although it is not used."""
    if resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY:
        return True
    try:
        return _OVERCOMMIT.read_text(encoding="ascii").strip() == _NEVER
    except OSError:
        return False


def unshielded() -> str:
    """What still ends a server that :func:`launch` started, if no proxy stands before it. Measured
    with tritonserver 2.51."""
    stack = stack_bytes()
    return (
        f"a form (application/x-www-form-urlencoded) of over {stack // 2 >> 20} MiB, or JSON "
        f"nested more than {stack // 134:,} deep, may end this server"
    )


def launch(
    command: Sequence[str], secret: Sequence[str], environment: Mapping[str, str], **options: Any
) -> subprocess.Popen[bytes]:
    """Start ``command`` with the arguments ``secret`` at its end; ``options`` are Popen's.

    If the main thread calls it, the program is killed when this process ends, however it ends.

    Some systems do not allow to trace a child (a container may forbid it). There the program gets
    its arguments in the open, and a warning is logged if any of them is secret.
    """
    # Another thread may end long before this process: then the program must go on.
    is_main_thread = threading.current_thread() is threading.main_thread()
    end_signal = _SIGKILL if is_main_thread else _NO_SIGNAL
    process = _launch_hidden(command, secret, environment, end_signal, options)
    if process is not None:
        return process
    if secret:
        _LOG.warning("the key of the server's restricted endpoints is visible to every local user")
    program = [*_python(_UNTRACED), *_values_for(end_signal), *command, *secret]
    return subprocess.Popen(program, env=environment, **options)


def _values_for(end_signal: str) -> list[str]:
    """What the small program takes before the real one: argv[1] to argv[3]."""
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
    """Start the program with hidden arguments. None: this system does not allow that."""
    names = [f"JITNEY_ARGUMENT_{number}" for number in range(len(secret))]
    program = [*_python(_TRACED), *_values_for(end_signal), *command, *names]
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
    """Let each argument in ``names`` of a program that has not run yet point to the value of the
    variable of that name. Raises OSError and ValueError."""
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
    # The program's name, in parentheses, may hold spaces: the fields are counted behind it.
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
    """The index of the text with this beginning. Each of ``texts`` ends in a zero. Raises
    ValueError if there is none."""
    # Search for the zero before the text too, so that only a beginning matches. With one zero put
    # in front, the index of that zero is the index of the text in ``texts``.
    return (b"\0" + texts).index(f"\0{beginning}".encode())
