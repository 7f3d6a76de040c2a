"""What every child process of a job does: it ends with the job's process, and only then."""

import multiprocessing
import multiprocessing.connection
import os
import signal
import threading


def live_as_child() -> None:
    """Ignore SIGINT and SIGTERM, which the job's process gets too. End when that process has ended,
    whatever ended it."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None, "it was started by multiprocessing"
    threading.Thread(target=_end_with_job, args=(parent.sentinel,), daemon=True).start()


def _end_with_job(sentinel: int) -> None:
    """End this process once the job's has ended, of which ``sentinel`` tells."""
    multiprocessing.connection.wait([sentinel])
    os._exit(1)
