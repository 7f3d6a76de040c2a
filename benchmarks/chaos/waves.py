"""Waves of requests with a kill in the middle of each, and the checks after it."""

import asyncio
import itertools
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from benchmarks.chaos.census import Census
from benchmarks.chaos.clients import WAYS, Doors, Heard, ask
from benchmarks.chaos.launcher import MARK, Launcher
from benchmarks.chaos.verdict import Outcome, Row, describe, judge
from benchmarks.chaos.workload import make_requests
from tests.compose.proxy import Proxy, Server, why_not

STREAMS = 32
REQUESTS = 16
"""Different ones: two streams of a wave have the same, as a rule in different ways."""
KILLS_A_START = 4
"""Kills between two starts of `jitney serve`: it repairs the same thing again after growing pauses.
It is then stopped in good order, and must leave nothing."""
_MOST_BEGUN = 20
"""Of the streams: so many at most have their first tokens when the kill comes."""
_LONGEST_DELAY_S = 0.3
"""Between the last of these first tokens and the kill, at most."""
_SERVED_AGAIN_S = 90.0
KEPT_BY_SERVER = Counter({"zombie triton_python_b": 1, "shared memory": 1})
"""What the server (2.51) keeps of each stub that was killed, until it ends itself: it neither
collects the process nor gives up the requests that the process had taken."""
_PAUSE_S = 0.3


@dataclass
class _Stream:
    """One client of a wave."""

    way: str
    request: int
    """Its index."""
    heard: Heard


class Chaos:
    """A launcher, the requests, and the answers that they have alone."""

    def __init__(self, launcher: Launcher, seed: int) -> None:
        self._launcher = launcher
        self._requests = make_requests(seed, REQUESTS)
        self._alone: list[Heard] = []
        self._chance = random.Random(seed)
        self._census = Census(launcher.mark, launcher.folder)
        self._nothing = self._census.take()
        """What the machine has while nothing runs."""

    def learn_answers(self) -> None:
        """Ask for each answer alone. Raises RuntimeError if one is not whole."""
        self._launcher.start()
        for request in self._requests:
            heard = Heard()
            asyncio.run(ask("gRPC", self._launcher.doors, request, heard))
            if not heard.is_whole:
                raise RuntimeError(f"a request alone was not answered: {heard.error}")
            self._alone.append(heard)
        self._launcher.stop()
        print(f"the answers to {REQUESTS} requests alone are known", file=sys.stderr)

    def run(self, process: str, kills: int) -> Row:
        """Kill one process so often."""
        row = Row(process)
        for start in itertools.count():
            count = min(KILLS_A_START, kills - start * KILLS_A_START)
            if count <= 0:
                return row
            self._launcher.start()
            for _ in range(count):
                row.kills += 1
                self._kill_once(row)
                print(f"{process}, kill {row.kills}: {describe(row)}", file=sys.stderr)
            self._stop(row)
        raise AssertionError("unreachable")

    def _stop(self, row: Row) -> None:
        """In good order: nothing may stay."""
        status, took_s = self._launcher.stop()
        if status != 0:
            text = f"jitney serve ended with status {status} after {took_s:.1f} s"
            row.note_defect(f"{text}:\n{self._launcher.log_tail()}")
        row.note_left(self._census.left(self._nothing))

    # ------------------------------------------------------------------ one kill

    def _kill_once(self, row: Row) -> None:
        if row.process == "proxy":
            with open_proxy(self._launcher) as proxy:
                before = self._census.take()
                asyncio.run(self._wave(row, _doors_of(proxy), proxy))
            with open_proxy(self._launcher) as proxy:
                asyncio.run(self._ask_later(row, _doors_of(proxy)))
                row.note_left(self._census.left(before))
            return
        before = self._census.take()
        if row.process == "stub":
            before += KEPT_BY_SERVER
        asyncio.run(self._wave(row, self._launcher.doors, None))
        if row.process == "launcher":
            # No process stays; folders and shared memory go with the next start.
            row.note_left(self._census.left(self._nothing, with_files=False))
            self._launcher.start()
        asyncio.run(self._ask_later(row, self._launcher.doors))
        row.note_left(self._census.left(before))

    async def _wave(self, row: Row, doors: Doors, proxy: Proxy | None) -> None:
        """All streams at once, and the kill when some of them have begun."""
        streams = self._make_streams()
        asked = []
        for stream in streams:
            request = self._requests[stream.request]
            asked.append(asyncio.create_task(ask(stream.way, doors, request, stream.heard)))
        most = self._chance.randrange(_MOST_BEGUN)
        while sum(bool(stream.heard.came) for stream in streams) < most:
            if all(task.done() for task in asked):
                break
            await asyncio.sleep(0.005)
        await asyncio.sleep(self._chance.uniform(0, _LONGEST_DELAY_S))
        killed_at = time.monotonic()
        if proxy is not None:
            # As the end of its container: the shell that is process 1, nginx and its workers.
            os.killpg(proxy.process.pid, signal.SIGKILL)
        elif row.process == "launcher":
            self._launcher.kill()
        else:
            self._launcher.process(row.process).kill()
        await asyncio.gather(*asked)
        for stream in streams:
            row.note_stream(stream.way, stream.heard, self._alone[stream.request], killed_at)

    def _make_streams(self) -> list[_Stream]:
        """Each way to ask equally often, with requests that change from wave to wave."""
        indices = [number % REQUESTS for number in range(STREAMS)]
        self._chance.shuffle(indices)
        ways = itertools.cycle(WAYS)
        return [_Stream(next(ways), index, Heard()) for index in indices]

    async def _ask_later(self, row: Row, doors: Doors) -> None:
        """One request in each way, as soon as it is served again."""
        deadline = time.monotonic() + _SERVED_AGAIN_S
        for way in WAYS:
            index = self._chance.randrange(len(self._requests))
            while True:
                heard = Heard()
                await ask(way, doors, self._requests[index], heard)
                is_error = judge(heard, self._alone[index]) == Outcome.ERROR
                if not is_error or time.monotonic() > deadline:
                    break
                await asyncio.sleep(_PAUSE_S)
            row.note_later(way, heard, self._alone[index])


# ------------------------------------------------------------------------------- the proxy


def why_no_proxy() -> str:
    """Why the proxy cannot be run here; empty if it can."""
    return why_not()


@contextmanager
def open_proxy(launcher: Launcher) -> Iterator[Proxy]:
    """The proxy that is shipped, in front of the launcher's server and gateway."""
    behind = Server(
        http_port=launcher.ports["http"],
        grpc_port=launcher.ports["grpc"],
        gateway_port=launcher.ports["openai"],
    )
    with Proxy(behind, **{MARK: launcher.mark}) as proxy:
        yield proxy


def _doors_of(proxy: Proxy) -> Doors:
    at = f"localhost:{proxy.port}"
    headers = proxy.client().headers
    certificate = proxy.secrets / "tls_certificate"
    return Doors(at, f"https://{at}", f"https://{at}", headers, certificate)
