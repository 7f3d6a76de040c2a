"""What every child process of a job does: it ends with the job's process, and only then."""

import multiprocessing
import multiprocessing.connection
import os
import signal
import threading


def live_as_child() -> None:
    """Leave signals to the job's process, and end once that has ended, however it did."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None, "it was started by multiprocessing"
    threading.Thread(target=_end_with_job, args=(parent.sentinel,), daemon=True).start()


def _end_with_job(sentinel: int) -> None:
    """End this process once the job's has ended, of which ``sentinel`` tells."""
    multiprocessing.connection.wait([sentinel])
    os._exit(1)
