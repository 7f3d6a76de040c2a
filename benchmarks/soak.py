"""An hour of requests of every kind, with the engine killed every two minutes: does anything grow?

    python -m benchmarks.soak --minutes 60          # or: make soak

24 clients of the demo model through the real server: whole streams, refused requests, deadlines,
and clients that leave in mid-stream. (Over HTTP: this server may crash when a gRPC stream is
cancelled in the moment of its last response.) At minute five and at the end the clients pause, and
what is held then is compared: memory, threads, handles, shared memory and blocks.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
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
from jitney_server.server import TritonServer

from benchmarks.chaos import FIRST_S, KINDS, MODEL, Answer, ask, copy_model, engine_of

CLIENTS = 24
SAMPLE_S = 5.0
KILL_S = 120.0
FIRST_MINUTES = 5.0
CACHE_MB = 256
WEIGHTS_MB = 20
"""Of the demo model in float32."""
SHARES = {"whole": 70, "refused": 10, "deadline": 10, "leaves": 10}
"""Kind of a request -> its share in percent."""


@dataclass
class Sample:
    """What the language model's processes hold."""

    minute: float
    front_mb: float
    """Its own memory: without :attr:`libraries_mb`."""
    libraries_mb: float
    """The front's share of the files that it maps: it changes with who else maps them."""
    engine_mb: float
    """ForkServer and engine, memory that they share counted once; with weights and cache."""
    threads: int
    handles: int
    shared_mb: float
    """The server's and the front's region in /dev/shm."""
    used_blocks: float


class Soak:
    """A server under load, and what was seen of it."""

    def __init__(self, server: TritonServer, seed: int) -> None:
        self.server = server
        self.samples: list[Sample] = []
        self.ends: Counter[str] = Counter()
        """How many requests of each kind ended as they should, and "kind: error" of the others."""
        self.kills = 0
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
            for task in running:
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
            aiohttp.ClientSession() as session,
            grpc.InferenceServerClient(self.server.grpc_url) as client,
        ):
            while True:
                await self._running.wait()
                (kind,) = self._chance.choices(list(SHARES), list(SHARES.values()))
                self._busy += 1
                try:
                    failure = await self._one(kind, session, client)
                finally:
                    self._busy -= 1
                self.ends[kind if not failure else f"{kind}: {failure[:90]}"] += 1

    async def _one(
        self, kind: str, session: aiohttp.ClientSession, client: grpc.InferenceServerClient
    ) -> str:
        """One request; what went wrong with it, or nothing."""
        url = f"http://{self.server.http_url}/v2/models/{MODEL}/generate_stream"
        key = next(self._keys)
        chance = self._chance
        prompt = [chance.randrange(10, 3000) for _ in range(chance.randint(16, 704))]
        params = {"max_tokens": chance.randint(16, 256), "seed": key, **KINDS[key % len(KINDS)]}
        if kind == "whole":
            answer = Answer()
            await ask(client, prompt, params, answer)
            return answer.error
        if kind == "refused":
            params["temperature"] = -1
        elif kind == "deadline":
            params["deadline_ms"] = 100
        body = {"input_ids": prompt, "stream": True, "sampling_parameters": json.dumps(params)}
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
            engine = engine_of(self.server)
            if engine is not None and time.time() - engine.create_time() > FIRST_S:
                engine.kill()
                self.kills += 1

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(SAMPLE_S)
            with contextlib.suppress(psutil.NoSuchProcess):  # it was killed just now
                self.samples.append(await self._sample())

    async def _sample(self) -> Sample:
        assert self.server.pid is not None
        (stub,) = psutil.Process(self.server.pid).children()
        below = stub.children(recursive=True)
        libraries = _share_mb(stub, "Pss_File")
        threads = handles = 0
        for one in (stub, *below):
            threads += one.num_threads()
            handles += one.num_fds()
        regions = Path("/dev/shm").glob("triton_python_backend_shm_region_*")
        return Sample(
            minute=(time.monotonic() - self._began) / 60,
            front_mb=_share_mb(stub) - libraries,
            libraries_mb=libraries,
            engine_mb=sum(map(_share_mb, below)),
            threads=threads,
            handles=handles,
            shared_mb=sum(region.stat().st_size for region in regions) / 1e6,
            used_blocks=await self._used_blocks(),
        )

    async def _used_blocks(self) -> float:
        async with (
            aiohttp.ClientSession() as session,
            session.get(self.server.metrics_url) as response,
        ):
            lines = (await response.text()).splitlines()
        return sum(float(x.split()[-1]) for x in lines if x.startswith("jitney_kv_used_blocks{"))


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
        if name not in ("minute", "libraries_mb") and after > most:
            yield f"{name}: {before:,.0f} at minute five, {after:,.0f} at the end"


def plot(samples: list[Sample], file: Path) -> None:
    """Memory, threads and handles over time."""
    mpl.use("svg")
    import matplotlib.pyplot as plt

    minutes = [sample.minute for sample in samples]
    figure, (memory, counts) = plt.subplots(2, 1, sharex=True, figsize=(8, 5), layout="tight")
    for name in ("front_mb", "libraries_mb", "engine_mb", "shared_mb"):
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
    """Returns the exit status: 0 if nothing has grown and every request ended as it should."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--plot", type=Path, default=Path("build/soak.svg"))
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        options = {"dtype": "float32", "kv_cache_bytes": CACHE_MB << 20}
        copy_model(Path(folder), **options)
        with TritonServer(Path(folder)) as server:
            soak = Soak(server, arguments.seed)
            first, last = asyncio.run(soak.run(arguments.minutes))
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
    differences = list(grown(first, last))
    print("\n".join(differences) or "Nothing has grown.", file=sys.stderr)
    return 1 if differences or set(soak.ends) - set(SHARES) else 0


if __name__ == "__main__":
    sys.exit(main())
