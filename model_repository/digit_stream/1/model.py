"""A running recogniser: what digit do all views of a sequence, taken together, show?

Views of one digit are independent evidence: the classifier's log-probabilities add up, and their
softmax is the answer so far (a uniform prior over the ten digits). The views of a batch, each of
another sequence, are classified by one inner request to `digits`.

Owns the evidence, by the request's own correlation id, a number or a text. (The batcher's control
input for it holds a number: texts that differ may come as the same one.) The server's sequence
batcher sees to the order within a sequence and refuses one without a start. It does not say when a
sequence ended by falling silent, so evidence that was not touched for twice the idle limit is
dropped here: by then the server has forgotten the sequence and takes no more views of it.
"""

import json
import threading
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

DIGITS = "digits"
CLASSES = 10
TICK_S = 0.5
"""Seconds between two looks for silent sequences, at most."""


@dataclass
class Evidence:
    """Of one sequence so far."""

    log_probabilities: np.ndarray = field(default_factory=lambda: np.zeros(CLASSES))
    views: int = 0
    touched: float = field(default_factory=time.monotonic)

    def add(self, logits: np.ndarray) -> None:
        """Take in the classifier's answer to one view, [CLASSES]."""
        self.log_probabilities += log_softmax(logits.astype(np.float64))
        self.views += 1

    def probabilities(self) -> np.ndarray:
        """FP32 [CLASSES], in sum 1."""
        return np.exp(log_softmax(self.log_probabilities)).astype(np.float32)


class OpenSequences:
    """The evidence of every sequence that has begun and not ended. Safe between threads."""

    def __init__(self, forget_after_s: float) -> None:
        self._forget_after_s = forget_after_s
        self._entries: dict[int | str, Evidence] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        with self._lock:
            return len(self._entries)

    def begin(self, sequence: int | str) -> None:
        """Start from nothing, whatever was there."""
        with self._lock:
            self._entries[sequence] = Evidence()

    def touch(self, sequence: int | str) -> Evidence | None:
        """Of a sequence that has begun, else None."""
        with self._lock:
            evidence = self._entries.get(sequence)
            if evidence is not None:
                evidence.touched = time.monotonic()
            return evidence

    def end(self, sequence: int | str) -> None:
        """Forget it."""
        with self._lock:
            self._entries.pop(sequence, None)

    def sweep(self, now: float) -> None:
        """Forget what was not touched for too long."""
        with self._lock:
            for sequence, evidence in list(self._entries.items()):
                if now - evidence.touched > self._forget_after_s:
                    del self._entries[sequence]


@dataclass
class View:
    """One request: which sequence, its flags, and the image, or why that is no image."""

    sequence: int | str
    start: bool
    end: bool
    image: np.ndarray
    refusal: str = ""


class InnerError(RuntimeError):
    """The classifier refused or failed; the message is its own."""


class TritonPythonModel:
    """Called by the server's stub, one batch of requests at a time."""

    def initialize(self, args: dict[str, Any]) -> None:
        """Start the thread that forgets silent sequences and keeps the gauge."""
        config = json.loads(args["model_config"])
        limit_s = int(config["sequence_batching"]["max_sequence_idle_microseconds"]) / 1e6
        self._ledger = OpenSequences(2 * limit_s)
        self._family = pb_utils.MetricFamily(
            name="jitney_digit_stream_sequences",
            description="Sequences whose evidence is kept",
            kind=pb_utils.MetricFamily.GAUGE,
        )
        self._gauge = self._family.Metric(labels={"model": args["model_name"]})
        self._stop = threading.Event()
        tick_s = min(limit_s / 4, TICK_S)
        self._sweeper = threading.Thread(target=self._sweep, args=(tick_s,), daemon=True)
        self._sweeper.start()

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        """One response per request, in order."""
        try:
            return self._read(requests)
        except Exception:  # the clients must hear of it, but not what this machine looks like
            pb_utils.Logger.log_error(f"a batch of views failed: {traceback.format_exc()}")
            text = "the recognition failed; the server's log says why"
            return [_failure(text, pb_utils.TritonError.INTERNAL) for _ in requests]

    def _read(self, requests: Sequence[Any]) -> list[Any]:
        views = [read_view(request) for request in requests]
        for view in views:
            if view.start:
                self._ledger.begin(view.sequence)
        accepted = [view for view in views if not view.refusal]
        try:
            logits = classify([view.image for view in accepted])
        except InnerError as error:
            code = pb_utils.TritonError.UNAVAILABLE
            answers = [_failure(f"{DIGITS}: {error}", code) for _ in accepted]
        else:
            answers = [self._answer(*each) for each in zip(accepted, logits, strict=True)]
        for view in views:
            if view.end:
                self._ledger.end(view.sequence)
        following = iter(answers)
        return [_failure(view.refusal) if view.refusal else next(following) for view in views]

    def finalize(self) -> None:
        """Called when every request was answered."""
        self._stop.set()
        self._sweeper.join()
        # Dropped later, with the model itself, they find the stub's shared memory gone: SIGSEGV.
        del self._gauge, self._family

    def _answer(self, view: View, logits: np.ndarray) -> Any:
        evidence = self._ledger.touch(view.sequence)
        if evidence is None:
            return _failure(f"sequence {view.sequence} was silent for too long: start it again")
        evidence.add(logits)
        probabilities = evidence.probabilities()
        digit = int(probabilities.argmax())
        return pb_utils.InferenceResponse(
            [
                pb_utils.Tensor("probabilities", probabilities[None]),
                pb_utils.Tensor("digit", np.array([[digit]], np.int64)),
                pb_utils.Tensor("views", np.array([[evidence.views]], np.int64)),
            ]
        )

    def _sweep(self, tick_s: float) -> None:
        """The sweeper's thread; the only one to touch the gauge, which is a round trip."""
        shown = -1
        while not self._stop.wait(tick_s):
            self._ledger.sweep(time.monotonic())
            count = len(self._ledger)
            if count != shown:
                self._gauge.set(count)
                shown = count


def read_view(request: Any) -> View:
    """A request's image, FP32 [1, 8, 8], and the sequence batcher's control inputs."""

    def control(name: str) -> int:
        return int(pb_utils.get_input_tensor_by_name(request, name).as_numpy().reshape(-1)[0])

    image = pb_utils.get_input_tensor_by_name(request, "image").as_numpy()[0]
    view = View(request.correlation_id(), bool(control("START")), bool(control("END")), image)
    if not np.isfinite(image).all():
        _, row, column = np.argwhere(~np.isfinite(image))[0]
        view.refusal = (
            f"image is {image[0, row, column]} at row {row}, column {column}: it must be finite"
        )
    return view


def classify(images: Sequence[np.ndarray]) -> np.ndarray:
    """Logits, FP32 [images, CLASSES], by one inner request. Raises InnerError."""
    if not images:
        return np.empty((0, CLASSES), np.float32)
    request = pb_utils.InferenceRequest(
        model_name=DIGITS,
        requested_output_names=["logits"],
        inputs=[pb_utils.Tensor("image", np.stack(images))],
    )
    try:
        response = request.exec()
    except pb_utils.TritonModelException as error:
        raise InnerError(str(error)) from None
    if response.has_error():
        raise InnerError(response.error().message())
    return pb_utils.get_output_tensor_by_name(response, "logits").as_numpy()


def log_softmax(values: np.ndarray) -> np.ndarray:
    """Over the last axis."""
    shifted = values - values.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def _failure(message: str, code: Any = None) -> Any:
    """An error of the client's making, unless ``code`` says otherwise."""
    code = pb_utils.TritonError.INVALID_ARG if code is None else code
    return pb_utils.InferenceResponse(error=pb_utils.TritonError(message, code))
