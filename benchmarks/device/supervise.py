"""The parts of the GPU benchmark in a process of their own, under one deadline.

A fault on a GPU (an illegal address, a kernel that hangs) ends its process or poisons it for good.
So the parts run in a worker process, one after the other; when it dies, reports that its device is
gone, or takes longer than a part may, it is killed and a fresh one goes on with the next part. The
supervisor itself imports no torch and holds the report.
"""

import gc
import multiprocessing
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.device.report import Report, Row


@dataclass(frozen=True)
class Part:
    """A function ``module:name`` that takes a :class:`Bench`, and the time it may have."""

    name: str
    target: str
    seconds: float
    """Its limit: the process is killed after it."""
    least: float = 5.0
    """With less than this left, it is not begun."""
    always: bool = False
    """Runs whatever is selected: others need its facts."""


class Bench:
    """A part's view of the run."""

    def __init__(
        self, part: str, until: float, facts: dict[str, Any], tiny: bool, send: Callable
    ) -> None:
        self.part = part
        self.facts = facts
        self.tiny = tiny
        self._until = until
        self._send = send

    def add(self, name: str, **fields: Any) -> Row:
        """Report a row of this part."""
        row = Row(self.part, name, **fields)
        self._send(("row", row))
        return row

    def fact(self, name: str, value: Any) -> None:
        """Something that later parts and the reader of the table need."""
        self.facts[name] = value
        self._send(("fact", name, value))

    @property
    def left(self) -> float:
        """Seconds until this part is killed."""
        return self._until - time.monotonic()

    def case(self, name: str, run: Callable[[], object], seconds: float = 0.0) -> bool:
        """Run one case; what it raises becomes a row of its own, and the part goes on. Not begun
        with less than ``seconds`` left. Raises again if the device does not answer any more."""
        if self.left < seconds:
            self.add(name, note=f"skipped: {self.left:.0f} s left")
            return False
        try:
            run()
        except Exception as error:
            trace = traceback.format_exc()
            print(trace, flush=True)
            self.add(name, error=f"{type(error).__name__}: {error}", details={"trace": trace})
            if device_is_gone():
                raise DeviceGoneError(str(error)) from error
        else:
            return True
        _release()  # what the case held is freed only now that its exception is
        return False


class DeviceGoneError(RuntimeError):
    """Nothing more can be run on the device by this process."""


def device_is_gone() -> bool:
    """Whether the device of this process fails whatever it is asked."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return False
    try:
        torch.cuda.synchronize()
        torch.zeros(1, device="cuda").item()
    except Exception:
        return True
    return False


def supervise(parts: list[Part], report: Report, seconds: float, tiny: bool = False) -> None:
    """Run all parts, or as many as ``seconds`` allow; what became of each stands in ``report``."""
    deadline = time.monotonic() + seconds
    worker: _Worker | None = None
    try:
        for part in parts:
            state = report.parts[part.name]
            left = deadline - time.monotonic()
            if left < part.least:
                state.status = "skipped"
                state.error = f"{max(left, 0):.0f} s were left"
                report.save()
                continue
            worker = worker or _Worker(tiny)
            began = time.monotonic()
            state.status = "running"
            report.save()
            print(f"-- {part.name}", flush=True)
            alive = worker.run(part, min(part.seconds, left), report)
            state.seconds = time.monotonic() - began
            print(f"-- {part.name}: {state.status} after {state.seconds:.1f} s", flush=True)
            report.save()
            if not alive:
                worker.kill()
                worker = None
    finally:
        if worker is not None:
            worker.kill()


class _Worker:
    """A worker process and the pipe to it."""

    def __init__(self, tiny: bool) -> None:
        context = multiprocessing.get_context("spawn")  # a fork would not have a fresh device
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_work, args=(theirs, tiny))
        self._process.start()
        theirs.close()

    def run(self, part: Part, seconds: float, report: Report) -> bool:
        """Have a part run. Returns whether the process can be given another one."""
        state = report.parts[part.name]
        until = time.monotonic() + seconds
        try:
            self._pipe.send((part.name, part.target, until, report.facts))
            while True:
                if not self._pipe.poll(max(0.0, until - time.monotonic())):
                    state.status = "late"
                    state.error = f"killed after {seconds:.0f} s"
                    return False
                kind, *content = self._pipe.recv()
                if kind == "row":
                    report.add(content[0])
                elif kind == "fact":
                    report.facts[content[0]] = content[1]
                    report.save()
                else:
                    state.error, gone = content
                    state.status = "done" if state.error is None else "failed"
                    return not gone
        except (EOFError, BrokenPipeError, ConnectionResetError):
            self._process.join(5)
            state.status = "died"
            state.error = f"exit status {self._process.exitcode}"
            return False

    def kill(self) -> None:
        """End the process, whatever it does."""
        self._process.kill()
        self._process.join()
        self._pipe.close()


def _work(pipe: Connection, tiny: bool) -> None:
    """The worker's life: a part at a time, until it is killed."""
    with suppress(EOFError):
        while True:
            name, target, until, facts = pipe.recv()
            error = None
            try:
                module, _, function = target.partition(":")
                getattr(import_module(module), function)(Bench(name, until, facts, tiny, pipe.send))
            except Exception as caught:
                error = f"{type(caught).__name__}: {caught}"
                print(traceback.format_exc(), flush=True)
            pipe.send(("end", error, device_is_gone()))
            _release()


def _release() -> None:
    """Give the device's memory back between two parts."""
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        with suppress(RuntimeError):  # a device that is gone: this process is about to be killed
            torch.cuda.empty_cache()
