"""What runs prepared rows: the engine in this process, an exported model (``onnx_executor.py``), a
server (``asking.py``), or nothing for a job without a model.

A :class:`~jitney_jobs.feeder.Feeder` hands rows over while an executor holds fewer than its
capacity, which keeps the engine's queue filled; a step gives the results that are ready.
"""

import math
import time
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from jitney.errors import InvalidArgumentError
from jitney.llm import LLM, Running

from jitney_jobs.asking import ServerExecutor
from jitney_jobs.chunk_executor import ChunkExecutor
from jitney_jobs.executor_protocol import Executor, Outcome
from jitney_jobs.generate import JobPrompt, LanguageModel
from jitney_jobs.job import Job
from jitney_jobs.onnx_executor import OnnxExecutor, newest_version
from jitney_jobs.tasks import Context
from jitney_jobs.tensors import takes_token_ids

_SETTINGS_OF_MODEL = (
    "task",
    "input_format",
    "model",
    "engine",
    "result",
    "batch_size",
    "tokenizer",
    "server",
    "tls",
    "ca_file",
    "api_key_file",
    "at_once",
    "row_timeout",
)
"""Jobs that differ in one of them cannot share a loaded model."""


class PassThrough:
    """No model: what was prepared is the result."""

    capacity = 1024

    def __init__(self) -> None:
        self._ready: list[Outcome] = []
        self.figures: dict[str, float] = {}

    def rank(self, prepared: Any, is_last: bool) -> int:
        return 0

    def submit(self, key: int, prepared: Any) -> None:
        self._ready.append((key, prepared))

    def step(self) -> list[Outcome]:
        ready = self._ready
        self._ready = []
        return ready

    def close(self) -> None:
        self._ready.clear()


class EngineExecutor:
    """A checkpoint, run by the engine in this process."""

    def __init__(self, llm: LLM, row_timeout_s: float | None = None) -> None:
        """``row_timeout_s``: a row is bad whose first token is not there so long after the engine
        has begun with its prompt, or that is not done so long after its first token."""
        self._llm = llm
        self._row_timeout_s = row_timeout_s
        self.figures = llm.figures
        self._running: Running = {}
        self._prefilling_since: dict[int, float] = {}
        """When the engine began with the prompt of a row that has no token yet, in monotonic
        seconds. Only with a timeout, as ``_generating_since``."""
        self._generating_since: dict[int, float] = {}
        """When the first token of a row was there."""
        self._tiers: set[str | None] = set()
        """The tiers of all rows submitted so far. The capacity is at most what the engine's queue
        takes of each of them."""

    @property
    def capacity(self) -> int:
        return self._llm.capacity_for(self._tiers)

    def rank(self, prepared: JobPrompt, is_last: bool) -> tuple[float, list[int]]:
        """Sorted by prompt, so that rows with a common prefix run together. Among the last rows of
        the job those with a long output come first, so that none of them runs alone in the end."""
        if not is_last:
            return 0, prepared.ids
        return -_length_class(prepared.params.max_tokens), prepared.ids

    def submit(self, key: int, prepared: JobPrompt) -> None:
        (submit,) = self._llm.requests([prepared.ids], prepared.params)
        self._tiers.add(submit.params.tier)
        self._running[key] = self._llm.start(submit)

    def step(self) -> list[Outcome]:
        ended: list[Outcome] = []
        for key, done in self._llm.collect_ended(self._running):
            self._forget_times(key)
            ended.append((key, done.error or done))
        if self._row_timeout_s is not None:
            ended += self._end_slow_rows(self._row_timeout_s)
        return ended

    def _end_slow_rows(self, timeout_s: float) -> list[Outcome]:
        """Cancel rows whose prompt, or whose output, takes longer than ``timeout_s``. Rows that
        wait for their turn are not slow."""
        now = time.monotonic()
        slow: list[Outcome] = []
        for key, request in self._running.items():
            if request.completion.has_pending:
                what = "generate"
                since = self._generating_since.setdefault(key, now)
            elif self._llm.is_running(request):
                what = "prefill"
                since = self._prefilling_since.setdefault(key, now)
            else:
                self._prefilling_since.pop(key, None)  # it waits, perhaps again
                continue
            if now - since > timeout_s:
                why = f"it took longer than row_timeout ({timeout_s:g} s) to {what}"
                slow.append((key, InvalidArgumentError(why)))
        for key, _ in slow:
            self._forget_times(key)
        self._llm.cancel(self._running, [key for key, _ in slow])
        return slow

    def _forget_times(self, key: int) -> None:
        self._prefilling_since.pop(key, None)
        self._generating_since.pop(key, None)

    def close(self) -> None:
        self._llm.close()


def _length_class(max_tokens: int) -> float:
    """Outputs of up to twice the length have the same class. -1 means as many tokens as the context
    holds: the longest class."""
    return math.inf if max_tokens == -1 else max_tokens.bit_length()


def _tokenizer_of(model: str) -> str | None:
    """The ``tokenizer.json`` beside a model: in its folder, in its newest version, or in those of
    the model NAME_tokenizer of the same repository."""
    model_folder = Path(model)
    for folder in (model_folder, model_folder.with_name(f"{model_folder.name}_tokenizer")):
        for path in (newest_version(folder) / "tokenizer.json", folder / "tokenizer.json"):
            if path.is_file():
                return str(path)
    return None


class ModelKey(NamedTuple):
    """What a loaded model depends on: two jobs with the same key can share it."""

    settings: list[Any]
    file_times: list[float]
    """When its files were changed."""


class Models:
    """The loaded model of a job, kept for the next job that can share it."""

    def __init__(self) -> None:
        self._key: ModelKey | None = None
        self._loaded: tuple[Executor, Context] | None = None

    def load(self, job: Job) -> tuple[Executor, Context]:
        """As :func:`load`. A model is loaded again if its files have changed, or if it is on a
        server: that executor remembers how the requests of the job before ended."""
        key = _key_of(job)
        if self._loaded is None or key != self._key or job.server is not None:
            self.close()
            self._key = key
            self._loaded = load(job)
        executor, context = self._loaded
        for name in executor.figures:
            if name != "most_rows":  # it is no count, and the engine sets it once
                executor.figures[name] = 0.0
        return executor, msgspec.structs.replace(context, job=job)

    def close(self) -> None:
        """Close the executor, and forget it."""
        if self._loaded is not None:
            executor, _ = self._loaded
            executor.close()
        self._loaded = None


def _key_of(job: Job) -> ModelKey:
    settings = [getattr(job, name) for name in _SETTINGS_OF_MODEL]
    files: list[Path] = []
    if job.server is None and job.model is not None:  # else it is a name on a server, or none
        root = Path(job.model)
        files = [path for path in (root, *sorted(root.rglob("*"))) if path.exists()]
    return ModelKey(settings, [path.stat().st_mtime for path in files])


def load(job: Job) -> tuple[Executor, Context]:
    """Load what the job runs on, and what its task must know of it. Raises LoadError."""
    if job.task == "map":
        return PassThrough(), Context(job)
    if job.server is not None and job.input_format == "openai":
        from jitney_jobs.openai_server import OpenAiServer  # openai may be missing

        return ServerExecutor(OpenAiServer(job), job), Context(job)
    if job.server is not None:
        return _load_triton_model(job)
    executor, context = _load_here(job)
    if job.input_format == "openai":
        from jitney_jobs.line_executor import LineExecutor  # imports much of the gateway

        executor = LineExecutor(executor)
    return executor, context


def _load_here(job: Job) -> tuple[Executor, Context]:
    model = str(job.model)
    if job.task == "generate":
        llm = LLM(model, **job.engine)
        language_model = LanguageModel(llm.tokenizer.data, llm.config, llm.info)
        return EngineExecutor(llm, job.row_timeout), Context(job, language_model)
    onnx = OnnxExecutor(job)
    tokenizer = job.tokenizer or _tokenizer_of(model)
    # Each part of a line is a text, whatever the model takes (``openai_lines.py``).
    are_texts = takes_token_ids(onnx.signature) or job.input_format == "openai"
    context = Context(
        job, signature=onnx.signature, tokenizer=tokenizer, takes_blocks=not are_texts
    )
    return ChunkExecutor(onnx, in_blocks=True) if are_texts else onnx, context


def _load_triton_model(job: Job) -> tuple[Executor, Context]:
    from jitney_jobs.remote import TritonModel  # tritonclient may be missing

    model = TritonModel(job)
    executor = ServerExecutor(model, job)
    wants_language_model = job.task == "generate"
    if model.is_language_model != wants_language_model:
        executor.close()
        bound = "generate for a language model, and another task for any other model"
        raise InvalidArgumentError.of("task", job.task, bound)
    context = Context(job, signature=model.signature, tokenizer=job.tokenizer)
    if takes_token_ids(model.signature):
        return ChunkExecutor(executor, in_blocks=False), context
    return executor, context
