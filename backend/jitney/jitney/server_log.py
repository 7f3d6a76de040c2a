"""Sends the package's log records to the server's log, for all models of one Python stub."""

import logging
import sys
from typing import Any

from jitney import stub_memory


def log_to_server(logger: Any) -> None:
    """Send records of level INFO and above to ``logger``, the server's."""
    log = logging.getLogger("jitney")
    log.setLevel(logging.INFO)
    log.propagate = False
    log.handlers[:] = [_ServerLog(logger)]


class _ServerLog(logging.Handler):
    """Sends records. Each is a round trip to the server, so nothing logs per request or token."""

    def __init__(self, logger: Any) -> None:
        super().__init__()
        self._logger = logger

    def emit(self, record: logging.LogRecord) -> None:
        text = self.format(record)
        if not stub_memory.has_room():
            # The server would lose the whole stub. What the stub prints is in the server's log too.
            print(f"{record.levelname}: {text}", file=sys.stderr, flush=True)
        elif record.levelno >= logging.ERROR:
            self._logger.log_error(text)
        elif record.levelno >= logging.WARNING:
            self._logger.log_warn(text)
        else:
            self._logger.log_info(text)
