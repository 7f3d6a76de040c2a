"""An executor whose rows are requests to a server: ``openai_server.py`` or ``remote.py`` asks it.

One thread runs an event loop with all requests. They share kept connections; as many as the job's
``at_once`` are under way. A request that fails is sent again here, as ``patience.py`` says.
"""

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, Protocol, TypeVar

from jitney.access import Access
from jitney.errors import JitneyError

from jitney_jobs.failures import Meaning, RequestError
from jitney_jobs.job import Job
from jitney_jobs.patience import Patience, Pause, Tries

TIMEOUT_S = 600.0
"""Without a response for so long, a request is given up."""
_STEP_S = 0.2
"""Longest step, in seconds."""
_MOST_PAUSING = 4096
"""Most rows that wait for their next try beside those that are asked."""
_TELL_EVERY_S = 30.0
"""Seconds between two warnings that the server is waited for."""
_LOG = logging.getLogger(__name__)
T = TypeVar("T")


class Server(Protocol):
    """Who is asked. All calls come from one event loop."""

    async def open(self) -> bool:
        """Connect, and check that the job can be done there. Returns whether the server has
        answered. Raises JitneyError."""

    async def ask(self, prepared: Any) -> Any:
        """The result of a row. Raises RequestError."""

    async def close(self) -> None:
        """Close the connections."""


class ServerExecutor:
    """Keeps requests under way."""

    def __init__(self, server: Server, job: Job) -> None:
        """Opens the server. Raises what that raises; while the server is away, it is tried again
        for as long as the job's patience says."""
        self.figures: dict[str, float] = {"tries": 0.0}
        self._server = server
        self._at_once = job.at_once
        self._row_timeout_s = job.row_timeout
        self._patience = Patience(job.retries, job.patience_s)
        self._slots = asyncio.Semaphore(job.at_once)
        self._num_pausing = 0
        self._told_at: float | None = None
        """When it was last said that the server is waited for."""
        self._tasks: set[asyncio.Task[None]] = set()
        """The event loop does not keep them from being collected."""
        self._ended: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        try:
            self._call(self._open())
        except BaseException:
            self.close()
            raise

    @property
    def capacity(self) -> int:
        """Rows that only wait for their next try hold up no others."""
        return 2 * self._at_once + min(self._num_pausing, _MOST_PAUSING)

    def rank(self, prepared: Any, is_last: bool) -> int:
        return 0

    def submit(self, key: int, prepared: Any) -> None:
        self._loop.call_soon_threadsafe(self._begin, key, prepared)

    def step(self) -> list[tuple[int, Any]]:
        """Wait until a row has ended, or for a moment."""
        ended = []
        try:
            ended.append(self._ended.get(timeout=_STEP_S))
            while True:
                ended.append(self._ended.get_nowait())
        except queue.Empty:
            return ended

    def close(self) -> None:
        """Cancel the requests under way. Returns when they have ended."""
        if self._loop.is_closed():
            return
        self._call(self._end_all())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    # ------------------------------------------------------------------ in the caller's thread

    def _call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run it in the event loop, and wait for it. A signal's exception cancels it."""
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    # ------------------------------------------------------------------ in the event loop

    async def _open(self) -> None:
        tries = Tries()
        while True:
            tries.sent_at = time.monotonic()
            try:
                self._patience.has_answered = await self._server.open()
                return
            except RequestError as error:
                await asyncio.sleep(self._seconds_to_wait(-1, tries, error))

    def _begin(self, key: int, prepared: Any) -> None:
        task = self._loop.create_task(self._run(key, prepared))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, key: int, prepared: Any) -> None:
        """Ask until the row ends, and hand it over."""
        try:
            result = await self._asked(key, prepared)
        except JitneyError as error:
            result = error.detached()
        except Exception as error:  # a bug of ours ends the job, and not this task alone
            _LOG.exception("a request could not be made")
            result = JitneyError(f"a request could not be made: {type(error).__name__}: {error}")
        self._ended.put((key, result))

    async def _asked(self, key: int, prepared: Any) -> Any:
        """The result. Raises what the row ends with."""
        tries = Tries()
        while True:
            async with self._slots:
                await self._wait_until_open()
                tries.sent_at = time.monotonic()
                try:
                    result = await self._answer_in_time(prepared)
                except RequestError as error:
                    pause_s = self._seconds_to_wait(key, tries, error)
                else:
                    self._patience.note_passed(time.monotonic())
                    return result
            self._num_pausing += 1
            try:
                await asyncio.sleep(pause_s)
            finally:
                self._num_pausing -= 1
            self.figures["tries"] += 1

    async def _answer_in_time(self, prepared: Any) -> Any:
        """The result. Raises RequestError."""
        try:
            async with asyncio.timeout(self._row_timeout_s):
                return await self._server.ask(prepared)
        except TimeoutError:
            said = f"the server took longer than row_timeout ({self._row_timeout_s:g} s)"
            error = RequestError.of_meaning(Meaning.SLOW, said)
            error.error_code = "request_timeout"
            raise error from None

    async def _wait_until_open(self) -> None:
        while True:
            pause_s = self._patience.closed_until - time.monotonic()
            if pause_s <= 0:
                return
            await asyncio.sleep(pause_s)

    def _seconds_to_wait(self, key: int, tries: Tries, error: RequestError) -> float:
        """Raises what the row ends with."""
        now = time.monotonic()
        next_step = self._patience.judge(key, tries, error, now)
        if not isinstance(next_step, Pause):
            raise next_step from None
        wait_s = self._patience.closed_until - now
        if wait_s > 0 and (self._told_at is None or now - self._told_at >= _TELL_EVERY_S):
            self._told_at = now
            _LOG.warning("%s; asked again in %.0f s", error, wait_s)
        return next_step.seconds

    async def _end_all(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._server.close()


def access_of(job: Job) -> Access:
    """How the job reaches its server: TLS, certificates and key. Raises InvalidArgumentError for
    files that cannot be read."""
    ca_file = None if job.ca_file is None else Path(job.ca_file)
    key_file = None if job.api_key_file is None else Path(job.api_key_file)
    tls = job.tls or str(job.server).startswith("https:")
    return Access.of(tls, ca_file, key_file)
