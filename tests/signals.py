"""Signals for a child process that a test sends signals to."""

import signal


def heed_signals() -> None:
    """For ``preexec_fn``: whatever runs the tests, in the background or under nohup, may have had
    signals ignored, which children inherit."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
