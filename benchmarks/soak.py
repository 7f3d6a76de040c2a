"""An hour of requests of every kind, with the engine killed every two minutes: does anything grow?

    python -m benchmarks.soak --minutes 60          # or: make soak

24 clients of the demo model through `jitney serve`: whole streams over gRPC and from the gateway,
refused requests, deadlines, and clients that leave in mid-stream, over HTTP and gRPC. (Far from
the end: this server may crash when a gRPC stream is cancelled in the moment of its last response.)
At minute five and at the end the clients pause, and what is held then is compared: memory, threads,
handles, shared memory and blocks. At last the launcher is stopped while the clients hold their
connections: its exit status must be 0, within the grace and 5 s.
"""

import argparse
import asyncio
import contextlib
import itertools
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import aiohttp
import matplotlib as mpl
import psutil
import tritonclient.grpc.aio as grpc

from benchmarks.chaos.clients import GATEWAY, Heard, ask, stream_over_grpc, triton_body
from benchmarks.chaos.launcher import GRACE_S, Launcher
from benchmarks.chaos.workload import KINDS, MODEL, VOCABULARY, Request, copy_model

CLIENTS = 24
LONGEST_S = 900.0
"""A request that has no end for so long hangs. How fast it is served does not matter here, and a
busy machine may take minutes."""
SAMPLE_S = 5.0
KILL_S = 120.0
FIRST_S = 2.5
"""An engine younger than this may still be loading: it is not killed."""
STOP_S = GRACE_S + 5
"""Longest time that the launcher may take to end."""
FIRST_MINUTES = 5.0
CACHE_MB = 256
WEIGHTS_MB = 20
"""Of the demo model in float32."""
SHARES = {"whole": 55, "gateway": 10, "refused": 10, "deadline": 10, "leaves": 10, "cancels": 5}
"""Kind of a request -> its share in percent. Over gRPC: "whole" and "cancels"."""
MOST_BEFORE_CANCEL = 4
"""Responses after which a stream over gRPC is cancelled, at most."""
CANCELLED_TOKENS = 400
"""Of a stream that is cancelled: its end is far then."""


@dataclass
class Sample:
    """What the processes hold: the language model's, and all others below the launcher."""

    minute: float
    front_mb: float
    """Its own memory: without :attr:`libraries_mb`."""
    libraries_mb: float
    """The front's share of the files that it maps: it changes with who else maps them."""
    engine_mb: float
    """Fork server and engine, memory that they share counted once; with weights and cache."""
    server_mb: float
    """Not judged: it is not ours."""
    gateway_mb: float
    threads: int
    """Of the language model's processes and the gateway, as the handles."""
    handles: int
    shared_mb: float
    """The server's and the front's region in /dev/shm."""
    used_blocks: float


class Soak:
    """A launcher under load, and what was seen of it."""

    def __init__(self, launcher: Launcher, seed: int) -> None:
        self.launcher = launcher
        self.samples: list[Sample] = []
        self.ends: Counter[str] = Counter()
        """How many requests of each kind ended as they should, and "kind: error" of the others."""
        self.kills = 0
        self.stop_status = 0
        self.stop_s = 0.0
        """How the launcher ended, and how long that took."""
        self._began = time.monotonic()
        self._chance = random.Random(seed)
        self._keys = itertools.count()
        self._running = asyncio.Event()
        self._busy = 0

    async def run(self, minutes: float) -> tuple[Sample, Sample]:
        """What is held, nothing being under way, at minute five and at the end."""
        tasks = [self._work() for _ in range(CLIENTS)] + [self._watch(), self._kill_regularly()]
        async with asyncio.TaskGroup() as group:
            running = [group.create_task(task) for task in tasks]
            self._running.set()
            await asyncio.sleep(60 * min(FIRST_MINUTES, minutes / 3))
            first = await self._at_rest()
            self._running.set()
            await asyncio.sleep(60 * minutes - (time.monotonic() - self._began))
            last = await self._at_rest()
            for task in running[CLIENTS:]:
                task.cancel()
            # The clients are idle, and stay connected.
            self.stop_status, self.stop_s = await asyncio.to_thread(self.launcher.stop)
            for task in running[:CLIENTS]:
                task.cancel()
        return first, last

    async def _at_rest(self) -> Sample:
        self._running.clear()
        while self._busy:
            await asyncio.sleep(0.1)
        await asyncio.sleep(10)  # metrics are flushed, what a client left is cancelled
        return await self._sample()

    async def _work(self) -> None:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session,
            grpc.InferenceServerClient(self.launcher.doors.grpc) as client,
        ):
            while True:
                await self._running.wait()
                (kind,) = self._chance.choices(list(SHARES), list(SHARES.values()))
                self._busy += 1
                try:
                    async with asyncio.timeout(LONGEST_S):
                        failure = await self._one(kind, session, client)
                except TimeoutError:
                    failure = f"no end within {LONGEST_S:.0f} s"
                finally:
                    self._busy -= 1
                self.ends[kind if not failure else f"{kind}: {failure[:90]}"] += 1

    async def _one(
        self, kind: str, session: aiohttp.ClientSession, client: grpc.InferenceServerClient
    ) -> str:
        """One request; what went wrong with it, or nothing."""
        url = f"{self.launcher.doors.http}/v2/models/{MODEL}/generate_stream"
        key = next(self._keys)
        chance = self._chance
        prompt = chance.choices(VOCABULARY, k=chance.randint(16, 600))
        params = {"max_tokens": chance.randint(16, 256), "seed": key, **KINDS[key % len(KINDS)]}
        if kind == "whole":
            return _failure(await _stream(client, Request(prompt, params), leave_after=None))
        if kind == "gateway":
            heard = Heard()
            request = Request(prompt, params)
            await ask(GATEWAY, self.launcher.doors, request, heard, longest_s=LONGEST_S)
            return _failure(heard)
        if kind == "cancels":
            request = Request(prompt, {"max_tokens": CANCELLED_TOKENS, "ignore_eos": True})
            leave_after = chance.randint(1, MOST_BEFORE_CANCEL)
            return (await _stream(client, request, leave_after)).error
        if kind == "refused":
            params["temperature"] = -1
        elif kind == "deadline":
            params["deadline_ms"] = 100
        body = {**triton_body(Request(prompt, params)), "stream": True}
        async with session.post(url, json=body) as response:
            if kind == "leaves":
                async for _ in response.content.iter_any():
                    if chance.random() < 0.2:
                        break
                response.close()
                return ""
            said = await response.text()
        fine = {"refused": "INVALID_ARGUMENT" in said, "deadline": bool(said)}
        return "" if fine[kind] else said

    async def _kill_regularly(self) -> None:
        while True:
            await asyncio.sleep(KILL_S)
            await self._running.wait()
            with contextlib.suppress(LookupError, psutil.NoSuchProcess):
                engine = self.launcher.process("engine")
                if time.time() - engine.create_time() > FIRST_S:
                    engine.kill()
                    self.kills += 1

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(SAMPLE_S)
            # It may have been killed just now.
            with contextlib.suppress(LookupError, psutil.NoSuchProcess):
                self.samples.append(await self._sample())

    async def _sample(self) -> Sample:
        stub = self.launcher.process("stub")
        below = stub.children(recursive=True)
        libraries = _share_mb(stub, "Pss_File")
        threads = handles = 0
        server = self.launcher.process("server")
        gateway = self.launcher.process("gateway")
        for one in (gateway, stub, *below):
            threads += one.num_threads()
            handles += one.num_fds()
        (run_folder,) = self.launcher.folder.glob("jitney-server-*/")
        regions = Path("/dev/shm").glob(f"{run_folder.name}-*")
        return Sample(
            minute=(time.monotonic() - self._began) / 60,
            front_mb=_share_mb(stub) - libraries,
            libraries_mb=libraries,
            engine_mb=sum(map(_share_mb, below)),
            server_mb=_share_mb(server),
            gateway_mb=_share_mb(gateway),
            threads=threads,
            handles=handles,
            shared_mb=sum(region.stat().st_size for region in regions) / 1e6,
            used_blocks=await self._used_blocks(),
        )

    async def _used_blocks(self) -> float:
        async with (
            aiohttp.ClientSession() as session,
            session.get(self.launcher.metrics_url) as response,
        ):
            lines = (await response.text()).splitlines()
        return sum(float(x.split()[-1]) for x in lines if x.startswith("jitney_kv_used_blocks{"))


async def _stream(
    client: grpc.InferenceServerClient, request: Request, leave_after: int | None
) -> Heard:
    """What was heard of a stream over gRPC, which is cancelled after so many responses."""
    heard = Heard(texts=[""] * request.n, reasons=[""] * request.n)
    await stream_over_grpc(client, request, heard, leave_after=leave_after)
    return heard


def _failure(heard: Heard) -> str:
    """What is wrong with an answer that should be whole; empty: nothing."""
    if heard.is_whole:
        return heard.error
    return heard.error or "no finish reason"


def _share_mb(process: psutil.Process, kind: str = "Pss") -> float:
    """Its proportional share of the memory of that kind that it has."""
    try:
        text = Path(f"/proc/{process.pid}/smaps_rollup").read_text(encoding="ascii")
    except OSError:
        raise psutil.NoSuchProcess(process.pid) from None
    return next(int(x.split()[1]) for x in text.splitlines() if x.startswith(f"{kind}:")) / 976.6


def grown(first: Sample, last: Sample) -> Iterator[str]:
    """What the end has more of than minute five. Memory may differ by a twentieth."""
    for name, before in asdict(first).items():
        after = getattr(last, name)
        most = before * (1.05 if name.endswith("_mb") else 1)
        if name not in ("minute", "libraries_mb", "server_mb") and after > most:
            yield f"{name}: {before:,.0f} at minute five, {after:,.0f} at the end"


def stopped_well(status: int, seconds: float) -> bool:
    """Whether the launcher ended as it must."""
    return status == 0 and seconds <= STOP_S


def plot(samples: list[Sample], file: Path) -> None:
    """Memory, threads and handles over time."""
    mpl.use("svg")
    import matplotlib.pyplot as plt

    minutes = [sample.minute for sample in samples]
    figure, (memory, counts) = plt.subplots(2, 1, sharex=True, figsize=(8, 5), layout="tight")
    for name in ("front_mb", "libraries_mb", "engine_mb", "server_mb", "gateway_mb", "shared_mb"):
        values = [getattr(sample, name) for sample in samples]
        memory.plot(minutes, values, label=name.removesuffix("_mb"))
    memory.set_ylabel("MB")
    for name in ("threads", "handles"):
        counts.plot(minutes, [getattr(sample, name) for sample in samples], label=name)
    counts.set_xlabel("minutes")
    for axes in (memory, counts):
        axes.set_ylim(bottom=0)
        axes.legend(frameon=False)
    figure.savefig(file)


def main() -> int:
    """Returns the exit status: 0 if nothing has grown, every request ended as it should, and so did
    the launcher."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--plot", type=Path, default=Path("build/soak.svg"))
    arguments = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(prefix="soak-") as repository,
        tempfile.TemporaryDirectory(prefix="soak-") as folder,
    ):
        options = {"dtype": "float32", "threads": 1, "kv_cache_bytes": CACHE_MB << 20}
        copy_model(Path(repository), **options)
        launcher = Launcher(Path(repository), Path(folder))
        try:
            launcher.start()
            soak = Soak(launcher, arguments.seed)
            first, last = asyncio.run(soak.run(arguments.minutes))
            said = launcher.log_tail()
        finally:
            launcher.end()
    arguments.plot.parent.mkdir(parents=True, exist_ok=True)
    plot(soak.samples, arguments.plot)
    names = [name for name in asdict(last) if name != "minute"]
    print("| at rest | " + " | ".join(names) + " |")
    print("|---|" + "---|" * len(names))
    for sample in (first, last):
        values = " | ".join(f"{getattr(sample, name):,.0f}" for name in names)
        print(f"| minute {sample.minute:.0f} | {values} |")
    beside = (
        max(one.front_mb + one.libraries_mb + one.engine_mb for one in soak.samples)
        - CACHE_MB * 1.048
        - WEIGHTS_MB
    )
    print(f"\nAt most {beside:,.0f} MB beside weights and cache; {soak.kills} kills. Requests:")
    for end, count in soak.ends.most_common():
        print(f"    {count:6,} {end}")
    print(f"\nThe launcher ended with status {soak.stop_status} after {soak.stop_s:.1f} s.")
    differences = list(grown(first, last))
    print("\n".join(differences) or "Nothing has grown.", file=sys.stderr)
    has_stopped = stopped_well(soak.stop_status, soak.stop_s)
    if not has_stopped:
        print(said, file=sys.stderr)
    is_fine = not differences and has_stopped and not set(soak.ends) - set(SHARES)
    return 0 if is_fine else 1


if __name__ == "__main__":
    sys.exit(main())
