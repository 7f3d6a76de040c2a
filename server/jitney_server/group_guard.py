"""The guard of a server: a small process that outlives the server, and the process that started it.

``server`` and the containers' process 1 call :func:`guard_group` after ``launch``.
"""

import resource
import subprocess

from jitney_server.launch import python_program

# Its arguments are:
#
#     argv[1]    the process id of the server
#     argv[2]    bytes of a usual stack
#
# It does two things.
#
# When the server has ended, it kills what is left of the server's process group. Stubs may be left
# if the server was killed, alone or with its launcher: they look for their server themselves, but
# may wait for ever for a lock in shared memory that the server held.
#
# Once the server has a second thread, it sets the server's limit of the stack back to the usual
# one, which stubs and engines inherit. At that time the server's C library has read the large
# limit, and goes on using it; and no stub has been started yet.
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


def guard_group(pid: int) -> None:
    """Start the guard of the server ``pid``, which ``launch`` has started.

    When the server ends, the guard kills every other process of the server's group. It does so even
    if the process that calls this has ended before. It also gives the processes that the server
    starts stacks of the usual size. Needs Linux 5.3 or later; elsewhere nothing happens.
    """
    usual_stack = resource.getrlimit(resource.RLIMIT_STACK)[0]
    subprocess.run(
        [*python_program(_GUARD), str(pid), str(usual_stack)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        check=False,
    )
