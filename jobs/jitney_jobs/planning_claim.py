"""Which shard makes the plan of a job when several begin together. The others wait, and need not
look at the whole input too.

The claim only saves time: even without it one plan alone would be created. The shard that makes the
plan writes its claim anew every few seconds; a claim that stays as it is belongs to a run that was
killed.
"""

import contextlib
import secrets
import threading
import time
from types import TracebackType

from jitney_jobs.output_files import OutputFiles

_NAME = "_job/planning"
_BEAT_S = 4.0
"""How often a claim is written."""
_STALE_S = 20.0
"""A claim that has not changed for so long counts no more."""


class PlanningClaim:
    """The claim of one shard. Within ``with`` a thread writes it anew."""

    def __init__(self, files: OutputFiles) -> None:
        self._files = files
        self._token = secrets.token_hex(8)
        self._ended = threading.Event()
        self._seen: bytes | None = None
        """The claim of another shard, as it was last read."""
        self._seen_at = 0.0
        """When that was read first, in monotonic seconds."""

    def take(self) -> bool:
        """Whether this shard is to make the plan. If not, ask again after a while. Raises
        OSError."""
        own = self._token.encode()
        if self._files.create(_NAME, own):
            return True
        try:
            there = self._files.read(_NAME)
        except FileNotFoundError:
            return False
        if there == own:  # the answer to an earlier request was lost
            return True
        now = time.monotonic()
        if there != self._seen:
            self._seen = there
            self._seen_at = now
        elif now - self._seen_at > _STALE_S:
            self._files.delete(_NAME)
        return False

    def __enter__(self) -> None:
        threading.Thread(target=self._beat, daemon=True).start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._ended.set()
        with contextlib.suppress(OSError):  # others wait until it is stale
            self._files.delete(_NAME)

    def _beat(self) -> None:
        beats = 0
        while not self._ended.wait(_BEAT_S):
            beats += 1
            with contextlib.suppress(OSError):  # if it lasts, another shard makes a plan, too
                self._files.put(_NAME, f"{self._token} {beats}".encode())
