"""Runs the types, each in a process of its own.

The process is forked from one that has imported torch, transformers and the engine already: else
the imports would take most of the time.
"""

import contextlib
import logging
import multiprocessing
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from pathlib import Path

import torch
import transformers
from jitney.errors import LoadError

from benchmarks.architectures.result import Result
from benchmarks.architectures.tiny import NotMadeError, make_checkpoint
from benchmarks.architectures.ways import WAYS, Run, Tokens, Way, generated, make_prompts, run


def sweep(
    types: list[str], *, jobs: int, timeout_s: float, ways: Sequence[Way] = WAYS
) -> list[Result]:
    """The results of all types, in their order; prints each as it comes."""
    found: dict[str, Result] = {}
    waiting = list(types)
    running: list[_Running] = []
    while waiting or running:
        while waiting and len(running) < jobs:
            running.append(_start(waiting.pop(0), ways, timeout_s))
        for ended in _ended(running):
            running.remove(ended)
            result = ended.result()
            found[result.model_type] = result
            print(_line(result), file=sys.stderr, flush=True)
    return [found[model_type] for model_type in types]


class _Running:
    """A type at work."""

    def __init__(
        self, model_type: str, process: ForkProcess, connection: Connection, timeout_s: float
    ) -> None:
        self.model_type = model_type
        self.process = process
        self.connection = connection
        self.timeout_s = timeout_s
        self.ends_at = time.monotonic() + timeout_s

    def result(self) -> Result:
        """What it sent, or how it ended. Ends the process."""
        try:
            if self.connection.poll():
                received: Result = self.connection.recv()
                return received
        except EOFError:
            pass  # it has ended without a word
        finally:
            if self.process.is_alive():
                self.process.kill()
            self.process.join()
        if time.monotonic() >= self.ends_at:
            return Result(self.model_type, fault=f"no end within {self.timeout_s:g} s")
        return Result(self.model_type, fault=f"its process ended with {self.process.exitcode}")


def _start(model_type: str, ways: Sequence[Way], timeout_s: float) -> _Running:
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(model_type, ways, there))
    process.start()
    there.close()
    return _Running(model_type, process, here, timeout_s)


def _ended(running: list[_Running]) -> list[_Running]:
    """Those that have sent a result, have ended or take too long: waits for at least one."""
    first_end = min(each.ends_at for each in running)
    ready = wait([each.connection for each in running], max(0.0, first_end - time.monotonic()))
    now = time.monotonic()
    return [each for each in running if each.connection in ready or now >= each.ends_at]


def _work(model_type: str, ways: Sequence[Way], connection: Connection) -> None:
    """In the process of a type, where nothing is worth a line of the log."""
    transformers.logging.set_verbosity_error()
    warnings.filterwarnings("ignore")
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115  (until the process ends)
    with tempfile.TemporaryDirectory() as folder:
        connection.send(_try_type(model_type, ways, Path(folder)))


def _try_type(model_type: str, ways: Sequence[Way], folder: Path) -> Result:
    result = Result(model_type)
    try:
        make_checkpoint(folder, model_type)
    except NotMadeError as error:
        result.not_made = str(error)
        return result
    prompts = make_prompts()
    try:
        expected = generated(folder, prompts)
    except Exception as error:
        result.not_made = f"transformers does not generate from it: {_first_line(error)}"
        expected = None
    if expected is not None:
        result.num_distinct = len({token for tokens in expected for token in tokens})
    for way in ways:
        with _faults_of(result, way.name):
            ran = run(folder, way, prompts)
            result.cache = ran.cache
            if expected is not None:
                result.ways[way.name] = _compare(ran, expected)
        if result.refusal or result.fault:
            break
    return result


@contextlib.contextmanager
def _faults_of(result: Result, way: str) -> Iterator[None]:
    """Notes a refusal, or an error that should have been one."""
    try:
        yield
    except LoadError as error:
        if result.cache:
            # It loads, but not with this way's options.
            result.ways[way] = f"refused: {_first_line(error)}"
        else:
            result.refusal = _first_line(error)
    except Exception as error:
        result.fault = f"{way}: {type(error).__name__}: {_first_line(error)}"


def _compare(ran: Run, expected: Tokens) -> str:
    """``same``, or which prompts differ and from which token on."""
    texts = []
    for name, tokens in (("", ran.tokens), (" grown", ran.again)):
        if tokens is None:
            continue
        for index, (got, right) in enumerate(zip(tokens, expected, strict=True)):
            if got != right:
                texts.append(f"prompt {index}{name} from token {_first_difference(got, right)}")
    if not texts:
        return "same"
    return "differs: " + ", ".join(texts)


def _first_difference(got: list[int], right: list[int]) -> int:
    for index, (one, other) in enumerate(zip(got, right, strict=False)):
        if one != other:
            return index
    return min(len(got), len(right))


def _first_line(error: Exception) -> str:
    lines = str(error).strip().split("\n")
    return lines[0][:400]


def _line(result: Result) -> str:
    """For the one who waits."""
    if result.not_made and not result.cache and not result.refusal and not result.fault:
        return f"{result.model_type}: not made: {result.not_made}"
    if result.fault:
        return f"{result.model_type}: FAULT {result.fault}"
    if result.refusal:
        return f"{result.model_type}: refused: {result.refusal}"
    other = {name: text for name, text in result.ways.items() if text != "same"}
    return f"{result.model_type}: {result.cache}: {other or 'all the same'}"
