"""An exported model, loaded by ONNX Runtime: in this process, or in one that can be ended.

A call into ONNX Runtime cannot be interrupted. So a job with ``row_timeout`` has its model in a
process of its own, which is ended, and started anew, if a batch takes longer, or if the model
crashes. That costs a copy of the arrays.
"""

import contextlib
import multiprocessing
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from jitney.errors import CheckpointError, InvalidArgumentError, JitneyError, UnavailableError
from jitney_server.standins.batch import BatchArrays, Batcher, ModelRequest
from jitney_server.standins.signature import Signature

from jitney_jobs.child_process import live_as_child
from jitney_jobs.rows import Arrays

Answer = Arrays | JitneyError
"""The outputs of a block of rows, or what went wrong with the block."""


class ModelCallEnded(InvalidArgumentError):
    """A call of the model did not end by itself, for the fault of any of its rows."""


class ModelSession(Protocol):
    """A loaded model. Blocks are arrays whose first dimension is the rows."""

    signature: Signature

    def run(self, blocks: Sequence[Arrays], output: str, patience: float = 1.0) -> list[Answer]:
        """All blocks together. Raises ModelCallEnded, if it takes longer than the time for a row,
        times ``patience``."""

    def close(self) -> None:
        """Give its memory back, whatever it does."""


class SessionHere:
    """In this process."""

    def __init__(self, file: Path, may_spin: bool) -> None:
        """Raises a LoadError. ``may_spin``: threads that wait may keep their cores busy."""
        from jitney_server.standins.onnx_options import read_options
        from jitney_server.standins.onnx_session import OnnxSession  # onnxruntime may be missing

        spinning = {"string_value": "1" if may_spin else "0"}
        options = read_options({"parameters": {"session.intra_op.allow_spinning": spinning}}, None)
        session = OnnxSession(file, options)
        self.signature = session.signature
        self._batcher = Batcher(session.run, session.signature, batching=True)

    def run(self, blocks: Sequence[Arrays], output: str, patience: float = 1.0) -> list[Answer]:
        requests = [ModelRequest(dict(block), (output,)) for block in blocks]
        answers = self._batcher.execute(requests)
        return [
            answer if isinstance(answer, JitneyError) else _on_host(answer) for answer in answers
        ]

    def close(self) -> None:
        pass  # the arrays of the session go with it


class SessionApart:
    """In a process of its own."""

    def __init__(self, file: Path, may_spin: bool, timeout_s: float) -> None:
        """``timeout_s``: most seconds of a row. Raises a LoadError."""
        self._arguments = (file, may_spin)
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._closed = False
        self._pipe: Any = None
        self._process: Any = None
        self.signature = self._start()

    def run(self, blocks: Sequence[Arrays], output: str, patience: float = 1.0) -> list[Answer]:
        """Raises ModelCallEnded also if the process dies."""
        try:
            if self._process is None:
                self._start()
            self._pipe.send((blocks, output))
            if not self._pipe.poll(patience * self._timeout_s):
                self._end()
                said = f"it took longer than row_timeout ({self._timeout_s:g} s) in the model"
                raise ModelCallEnded(said)
            answers: list[Answer] = self._pipe.recv()
        except (EOFError, OSError):
            self._end()
            raise ModelCallEnded("the process with the model died of it") from None
        return answers

    def _start(self) -> Signature:
        """Raises a LoadError."""
        spawn = multiprocessing.get_context("spawn")
        with self._lock:
            if self._closed:
                raise UnavailableError("the job has ended")
            self._pipe, theirs = spawn.Pipe()
            self._process = spawn.Process(target=_serve, args=(theirs, *self._arguments))
            self._process.start()
            theirs.close()  # so that an end of the process is an end of the pipe
        try:
            answer: Signature | Exception = self._pipe.recv()
        except EOFError:
            answer = CheckpointError(f"the process that loads {self._arguments[0]} has died")
        if isinstance(answer, Exception):
            self._end()
            raise answer
        return answer

    def _end(self) -> None:
        with self._lock:
            if self._process is not None:
                self._process.kill()
                self._process.join()
            self._process = None

    def close(self) -> None:
        self._closed = True
        self._end()


def _serve(pipe: Any, file: Path, may_spin: bool) -> None:
    """The life of the process."""
    live_as_child()
    try:
        session = SessionHere(file, may_spin)
    except Exception as error:
        pipe.send(error)
        return
    pipe.send(session.signature)
    with contextlib.suppress(EOFError):
        while True:
            blocks, output = pipe.recv()
            pipe.send(session.run(blocks, output))


def _on_host(answer: BatchArrays) -> Arrays:
    """An answer of arrays: inputs on the host have outputs there."""
    return {name: array for name, array in answer.items() if isinstance(array, np.ndarray)}
