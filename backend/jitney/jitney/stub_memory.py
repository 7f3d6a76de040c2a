"""The shared memory through which the server's Python stub sends messages to the server.

Every message takes some of it: a response, a log line, a metric, the question whether a client has
gone. The stub's pool grows for as long as the system lets it. Once it cannot grow, messages fail.
For most of them that is an exception, but not for these (2.51, and the sources of 26.07):

- A final response: the server takes no other one, so the request would never end.
- A log line, or the question whether a client has gone: a thread of the stub sends it, and the
  failure ends the whole process.

So the front and the handler of log records ask :func:`has_room` before they send one of these.
"""

import os
import resource
import time

ROOM = 16_384
"""Bytes that must be free in a pool that may not grow. The largest of these messages is a final
response of 4 KiB of data, which needs about 5 KiB."""
SPACE_TO_GROW = 16 << 20
"""With so many free bytes on ``FOLDER``, the pool can surely grow: by default it grows by a MiB.
Then the pool is not asked how full it is: it may be growing, and must not be asked meanwhile."""
FOLDER = "/dev/shm"
"""Where the pool is."""
WAIT_S = 0.01
"""Seconds between two questions of :func:`wait_for_room`."""


def has_room() -> bool:
    """Whether a small message finds memory. Takes a few microseconds. True outside of a stub."""
    return _may_grow() or _free_in_pool() >= ROOM


def wait_for_room(until: float) -> bool:
    """Wait until there is room, but no longer than ``until`` (monotonic seconds). Returns whether
    there is room; False after ``until``, even if there is."""
    while time.monotonic() < until:
        if has_room():
            return True
        time.sleep(WAIT_S)
    return False


def _may_grow() -> bool:
    """Whether the system surely lets the pool grow."""
    # The pool is a file. If the size of files is limited, it may have reached the limit.
    most_bytes_of_a_file, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if most_bytes_of_a_file != resource.RLIM_INFINITY:
        return False
    try:
        space = os.statvfs(FOLDER)
    except OSError:
        return False
    return space.f_bavail * space.f_frsize >= SPACE_TO_GROW


def _free_in_pool() -> int:
    """Bytes that are free in the pool."""
    try:
        # The stub has it built in.
        from c_python_backend_utils import shared_memory
    except ImportError:  # there is no stub, and no pool
        return ROOM
    free: int = shared_memory.free_memory()
    return free
