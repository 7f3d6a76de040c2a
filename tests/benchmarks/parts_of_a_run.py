"""Parts for the tests of the GPU benchmark's supervisor: each does what a device may do to us."""

import os
import signal
import time

from benchmarks.device.supervise import Bench


def fine(bench: Bench) -> None:
    """Two rows and a fact."""
    bench.fact("seen by", os.getpid())
    bench.add("first", value=1.0, unit="ms", ratio=0.9, bar=0.8)
    bench.add("second", value=2.0, unit="ms", ratio=0.7, bar=0.8)


def reads_facts(bench: Bench) -> None:
    """What an earlier part found reaches a later one, in whatever process."""
    bench.add("process", value=float(os.getpid()))
    bench.add("told", value=float(bench.facts["seen by"]))


def raises(bench: Bench) -> None:
    """Fails after its first row."""
    bench.add("before")
    raise ValueError("a bound was broken")


def cases(bench: Bench) -> None:
    """One case of three raises, one has no time."""
    bench.case("good", lambda: bench.add("good", value=1.0))
    bench.case("bad", lambda: 1 / 0)
    bench.case("long", lambda: bench.add("never"), seconds=1e9)
    bench.case("after", lambda: bench.add("after", value=2.0))


def dies(bench: Bench) -> None:
    """The process is gone, as a driver may end it."""
    bench.add("last words")
    time.sleep(0.2)  # the row is on its way
    os.kill(os.getpid(), signal.SIGKILL)


def hangs(bench: Bench) -> None:
    """A kernel that never ends."""
    time.sleep(600)
