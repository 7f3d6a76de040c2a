"""Ends the process of a model at once when its server has ended, and lets go of the server's
connections.

The server's stub itself looks for its server every 0.3 s, and ends without it. But before it ends,
it frees its shared memory, and there it may wait for ever for a lock that the dead server held.
Then everything that the stub has started stays too. So every backend of ours calls
:func:`end_with_server` before it loads anything.

A server that ``jitney serve`` has started also has a guard, a process that kills what is left
(``jitney_server.group_guard``). The thread of this module is for other servers. It does not always
help: while another thread waits for such a lock and holds Python's global interpreter lock, no
thread can run.
"""

import contextlib
import os
import select
import socket
import threading
import time

STATUS = 1
"""Exit status of a process whose server has ended."""
_LOOK_S = 0.1
"""Seconds between two looks at the parent, on a system without process descriptors."""


def end_with_server() -> None:
    """Have a thread end this process, without any clean-up, when the process that started it has
    ended. The processes of an engine end with this one by themselves.

    Before that, close the TCP sockets that this process has inherited: the server (2.51) starts it
    with all of its own. If it kept a client's connection open, the client would not learn that the
    server closes it, and the connection would stay in CLOSE_WAIT when the client does."""
    _close_inherited_sockets()
    watch = threading.Thread(
        target=_end_without, args=(os.getppid(),), name="jitney-server-watch", daemon=True
    )
    watch.start()


def _close_inherited_sockets() -> None:
    """Close every TCP socket that was open at the ``exec`` of this process. Python's own sockets
    never are: they are not inheritable."""
    for name in os.listdir("/proc/self/fd"):
        descriptor = int(name)
        # An error says that it is no socket, or that it is the listing itself.
        with contextlib.suppress(OSError):
            if not os.get_inheritable(descriptor):
                continue
            inherited = socket.socket(fileno=descriptor)
            if inherited.family in (socket.AF_INET, socket.AF_INET6):
                inherited.close()
            else:
                inherited.detach()


def _end_without(server: int) -> None:
    ended = select.poll()
    # OSError: the server has just ended, or this system has no process descriptors.
    with contextlib.suppress(OSError):
        ended.register(os.pidfd_open(server), select.POLLIN)
        ended.poll()
    # Mostly the server has ended by now. Without process descriptors, this loop waits for that. A
    # process whose parent ends gets another parent at once, even while the old one is a zombie.
    while os.getppid() == server:
        time.sleep(_LOOK_S)
    os._exit(STATUS)  # exit handlers and destructors would use the dead server's shared memory
