"""What runs prepared rows: the engine in this process, an exported model, a server
(``asking.py``), or nothing for a job without a model.

A :class:`Feeder` hands rows over while an executor holds fewer than its capacity, which keeps the
engine's queue filled; a step gives the results that are ready.
"""

import heapq
import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np
from jitney.errors import CheckpointError, InvalidArgumentError, JitneyError
from jitney.llm import LLM, Running
from jitney_server.standins.batch import Batcher, ModelRequest
from jitney_server.standins.exchange import model_path
from jitney_server.standins.signature import Signature

from jitney_jobs.asking import InServer, OpenAiServer
from jitney_jobs.dataset import pause
from jitney_jobs.generate import EncodedPrompt, Language
from jitney_jobs.job import Job
from jitney_jobs.prepare import Context, Item
from jitney_jobs.tensors import Arrays, chosen_output

Outcome = tuple[int, Any]
"""The row's key, and its result or a JitneyError."""
_SIZES = (8, 16, 32, 64, 128)
_ELEMENTS = (512, 1024, 2048, 4096)
_MEASURED = 3
"""Full batches of each size whose best rate counts: the first ones allocate."""
_POLL_S = 0.1
_OF_MODEL = (
    *("task", "model", "engine", "result", "batch_size", "tokenizer"),
    *("server", "tls", "ca_file", "api_key_file", "at_once"),
)


class Executor(Protocol):
    """For one thread. ``figures`` are counts since it was made: steps, rows in them, their most,
    tokens."""

    figures: dict[str, float]

    @property
    def capacity(self) -> int:
        """How many rows it may hold now."""

    def rank(self, prepared: Any, ending: bool) -> Any:
        """The key by which the rows of a generation are sorted (:class:`Feeder`), or sorted in
        reverse. The last generation, which is ``ending``, is never reversed."""

    def submit(self, key: int, prepared: Any) -> None:
        """Take a row. Raises InvalidArgumentError for one that cannot be run."""

    def step(self) -> list[Outcome]:
        """Work for a while; what has ended. Called while it holds rows: they all end, sooner or
        later."""

    def close(self) -> None:
        """Give memory and connections back; what is under way is dropped."""


class Passing:
    """No model: what was prepared is the result."""

    capacity = 1024

    def __init__(self) -> None:
        self._ready: list[Outcome] = []
        self.figures: dict[str, float] = {}

    def rank(self, prepared: Any, ending: bool) -> int:
        return 0

    def submit(self, key: int, prepared: Any) -> None:
        self._ready.append((key, prepared))

    def step(self) -> list[Outcome]:
        ready = self._ready
        self._ready = []
        return ready

    def close(self) -> None:
        self._ready.clear()


class InEngine:
    """A checkpoint, run by the engine in this process."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self.capacity = llm.capacity
        self.figures = llm.figures
        self._running: Running = {}

    def rank(self, prepared: EncodedPrompt, ending: bool) -> tuple[int, list[int]]:
        """By prefix; in the end by length of output first, in powers of two."""
        # Two items: the length of output, which counts in the end only, and the prompt.
        return -prepared.params.max_tokens.bit_length() if ending else 0, prepared.ids

    def submit(self, key: int, prepared: EncodedPrompt) -> None:
        (submit,) = self._llm.requests([prepared.ids], prepared.params)
        self._running[key] = self._llm.start(submit)

    def step(self) -> list[Outcome]:
        return [(key, done.error or done) for key, done in self._llm.collect_ended(self._running)]

    def close(self) -> None:
        self._llm.close()


class InSession:
    """An exported model, run by ONNX Runtime in this process.

    Its rows come sorted by length. If padding does not change the model's output, a batch has a
    number of elements: more short rows than long ones, and little padding. Otherwise nothing is
    padded, and a batch has a number of rows.
    """

    def __init__(self, job: Job) -> None:
        """Raises a LoadError, and InvalidArgumentError for an output that the model lacks."""
        from jitney_server.standins.onnx_options import read_options
        from jitney_server.standins.onnx_session import OnnxSession  # onnxruntime may be missing

        # Waiting threads of ONNX Runtime spin where a job has the cores for itself.
        spins = {"session.intra_op.allow_spinning": {"string_value": str(int(job.ray is None))}}
        options = read_options({"parameters": spins}, None)
        session = OnnxSession(_file_of(Path(str(job.model))), options)
        self.signature = _of_rows(session.signature)
        self._batcher = Batcher(session.run, session.signature, batching=True)
        self._output = chosen_output(job, self.signature)
        masked = any(info.name == "attention_mask" for info in self.signature.inputs)
        (taken,) = (info for info in self.signature.outputs if info.name == self._output)
        # Padding changes nothing if the mask excludes it and the output's shape does not vary.
        self._pads = masked and min(taken.dims, default=1) >= 0
        # A batch is counted in rows if the job gives its size, or if nothing is padded.
        self._by_rows = bool(job.batch_size) or not (self._pads and session.signature.can_batch)
        sizes = (job.batch_size,) if job.batch_size else _SIZES if self._by_rows else _ELEMENTS
        self._sizes = BatchSizes(sizes if session.signature.can_batch else (1,))
        self._held: dict[int, Arrays] = {}
        self._longest = 1
        """Of the rows that are held; 1 if that does not count."""
        self._pool = ThreadPoolExecutor(1, "jitney-session")
        self._ahead: tuple[list[int], Future[list[Any]]] = [], Future()
        """Keys of the rows that run, while their caller does something else, and what comes."""
        self.figures = dict.fromkeys(("steps", "rows_in_steps", "most_rows"), 0.0)

    @property
    def capacity(self) -> int:
        """The rows that run, and a batch of rows beside them."""
        return len(self._ahead[0]) + max(1, self._sizes.now // self._longest)

    def rank(self, prepared: Arrays, ending: bool) -> int:
        return _size(prepared)

    def submit(self, key: int, prepared: Arrays) -> None:
        self._held[key] = prepared
        if not self._by_rows:
            self._longest = max(self._longest, _size(prepared))

    def step(self) -> list[Outcome]:
        """Begin to run the rows that are held: together, or each alone if that fails. Returns the
        results of the rows that were begun by the call before."""
        keys, future = self._ahead
        rows = list(self._held.values())
        room = self.capacity - len(keys)  # rows of a full batch
        self._ahead = [*self._held], self._pool.submit(self._run, rows, room, self._sizes.now)
        self._held = {}
        self._longest = 1
        return list(zip(keys, future.result(), strict=True)) if keys else []

    def _run(self, rows: list[Arrays], room: int, size: int) -> list[Any]:
        """In the pool's thread: the answers."""
        if not rows:
            return []
        began = time.perf_counter()
        figures = self.figures
        joined = [
            ModelRequest({name: array[None] for name, array in row.items()}, (self._output,))
            for row in (_padded(rows) if self._pads else rows)
        ]
        answers = self._batcher.execute(joined)
        # Only a full batch tells how fast its size is.
        if len(rows) >= room:
            self._sizes.note(size, sum(map(_size, rows)) / (time.perf_counter() - began))
        # `most_rows` is an average: `room_before` is the room of all steps before.
        room_before = figures["most_rows"] * figures["steps"]
        figures["steps"] += 1
        figures["rows_in_steps"] += len(rows)
        figures["most_rows"] = (room_before + room) / figures["steps"]  # of a step, on average
        return list(answers)

    def close(self) -> None:
        self._held.clear()
        self._pool.shutdown(cancel_futures=True)


class BatchSizes:
    """The size of a batch: each of a few in turn, then the fastest."""

    def __init__(self, sizes: tuple[int, ...]) -> None:
        self._rates: dict[int, list[float]] = {size: [] for size in sizes}
        self.now = sizes[0]

    def note(self, size: int, rate: float) -> None:
        """A full batch of that size ran at that rate."""
        if len(self._rates[size]) < _MEASURED:
            self._rates[size].append(rate)
            left = [each for each, rates in self._rates.items() if len(rates) < _MEASURED]
            self.now = left[0] if left else max(self._rates, key=lambda at: max(self._rates[at]))


def _size(row: Arrays) -> int:
    """Its elements."""
    return sum(array.size for array in row.values())


def _padded(rows: list[Arrays]) -> list[Arrays]:
    """Filled up with zeros to one length, which the mask excludes."""
    shapes = {name: np.max([row[name].shape for row in rows], axis=0) for name in rows[0]}
    padded: list[Arrays] = []
    for row in rows:
        padded.append({name: np.zeros(shapes[name], array.dtype) for name, array in row.items()})
        for name, array in row.items():
            padded[-1][name][tuple(map(slice, array.shape))] = array
    return padded


def _of_rows(signature: Signature) -> Signature:
    """Without the first dimension, the batch's."""
    inputs, outputs = (
        tuple(info._replace(dims=info.dims[1:], symbols=info.symbols[1:]) for info in infos)
        for infos in (signature.inputs, signature.outputs)
    )
    return Signature(inputs, outputs)


def _file_of(model: Path) -> Path:
    """The model's file: itself, of a version's folder, or of a model's newest version."""
    if model.is_file():
        return model
    if not model.is_dir():
        raise CheckpointError(f"the model {model} is not there")
    return model_path(_newest(model), "model.onnx")


def _newest(model: Path) -> Path:
    """The folder of a model's newest version, or the folder itself if it has none."""
    found = [each for each in model.glob("*/") if each.name.isdigit()]
    return max(found, key=lambda each: int(each.name), default=model)


def _tokenizer_of(model: str) -> str | None:
    """The ``tokenizer.json`` beside a model: in its folder, in its newest version, or in those of
    the model NAME_tokenizer of the same repository."""
    folder = Path(model)
    for place in (folder, folder.with_name(f"{folder.name}_tokenizer")):
        for path in (_newest(place) / "tokenizer.json", place / "tokenizer.json"):
            if path.is_file():
                return str(path)
    return None


class Models:
    """What a job runs on, kept for the next one that has the same model and options."""

    _key: Any = None
    _loaded: tuple[Executor, Context] | None = None

    def load(self, job: Job) -> tuple[Executor, Context]:
        """As :func:`load`. Files of a model that changed are read again."""
        files: list[Path] = []
        if job.server is None and job.model is not None:  # else a name on a server, or none
            root = Path(str(job.model))
            files = [each for each in (root, *sorted(root.rglob("*"))) if each.exists()]
        key = [getattr(job, name) for name in _OF_MODEL], [each.stat().st_mtime for each in files]
        if self._loaded is None or key != self._key:
            self.close()
            self._key = key
            self._loaded = load(job)
        executor, context = self._loaded
        # Counts begin anew; `most_rows` is no count, and the engine sets it once.
        executor.figures.update(dict.fromkeys(executor.figures.keys() - {"most_rows"}, 0.0))
        return executor, msgspec.structs.replace(context, job=job)

    def close(self) -> None:
        """Give it back."""
        if self._loaded is not None:
            self._loaded[0].close()
        self._loaded = None


def load(job: Job) -> tuple[Executor, Context]:
    """Load what the job runs on, and what its task must know of it. Raises LoadError."""
    if job.task == "map":
        return Passing(), Context(job)
    if job.server is not None and job.input_format == "openai":
        api = OpenAiServer(job)
        return InServer(api.ask, job.at_once, api.abort), Context(job)
    if job.server is not None:
        from jitney_jobs.remote import TritonModel  # tritonclient may be missing

        server = TritonModel(job)
        if server.language != (job.task == "generate"):
            raise InvalidArgumentError.of("task", job.task, "generate, for a language model alone")
        context = Context(job, signature=server.signature, tokenizer=job.tokenizer)
        return InServer(server.ask, job.at_once), context
    model = str(job.model)
    if job.task == "generate":
        llm = LLM(model, **job.engine)
        return InEngine(llm), Context(job, Language(llm.tokenizer.data, llm.config, llm.info))
    session = InSession(job)
    tokenizer = job.tokenizer or _tokenizer_of(model)
    return session, Context(job, signature=session.signature, tokenizer=tokenizer)


class Feeder:
    """Prepared rows in front of an executor: in an order that suits it, and tried again. For one
    thread.

    Looks ahead: rows go in generations. When all rows of one have gone, those that came meanwhile
    are sorted by the executor's rank: so prompts with a common prefix follow one another, and rows
    of like length meet. A row is overtaken by rows of its own generation only, and the caller
    bounds how many these are. Once the input has ended, all that is left is one generation, long
    outputs first.
    """

    def __init__(self, executor: Executor, retries: int) -> None:
        self.tries = 0
        """Rows that were tried again."""
        self._executor = executor
        self._retries = retries
        self._new: list[Item] = []
        self._sorted: deque[Item] = deque()
        self._down = self._ending = False
        self._running: dict[int, Item] = {}
        """By key, those that the executor has."""
        self._again: list[tuple[float, int, Item]] = []
        """A heap: from when on a row may be tried again, its key and itself."""

    def __len__(self) -> int:
        return self.waiting + len(self._running) + len(self._again)

    @property
    def waiting(self) -> int:
        """Rows that the executor has not been given."""
        return len(self._new) + len(self._sorted)

    def add(self, item: Item) -> None:
        """Take a row, whose key is its own."""
        self._new.append(item)

    def step(self, ending: bool) -> list[tuple[Item, Any]]:
        """Fill the executor, and let it work for a while. The rows that have ended, with result or
        JitneyError. ``ending``: no more rows come."""
        if ending and not self._ending:
            self._ending = True
            self._new += self._sorted
            self._sorted.clear()
        if self._again and not self.waiting and not self._running:
            time.sleep(max(0.0, min(_POLL_S, self._again[0][0] - time.monotonic())))
        while self._again and self._again[0][0] <= time.monotonic():
            self._sorted.appendleft(heapq.heappop(self._again)[-1])
        ended: list[tuple[Item, Any]] = []
        while self.waiting and len(self._running) < self._executor.capacity:
            if not self._sorted:
                self._look_ahead()
            item = self._sorted.popleft()
            try:
                if isinstance(item.made, InvalidArgumentError):
                    raise item.made
                self._executor.submit(item.key, item.made)
                self._running[item.key] = item
            except InvalidArgumentError as error:
                ended.append((item, error))
        for key, result in self._executor.step() if self._running else ():
            item = self._running.pop(key)
            if _may_pass(result) and item.tries < self._retries:
                heapq.heappush(self._again, (time.monotonic() + pause(item.tries), key, item))
                item.tries += 1
                self.tries += 1
            else:
                ended.append((item, result))
        return ended

    def _look_ahead(self) -> None:
        """Begin a generation. Generations ascend and descend in turn, so that rows are alike where
        one ends and the next begins."""

        def rank(item: Item) -> Any:
            bad = isinstance(item.made, InvalidArgumentError)
            return (0,) if bad else (1, self._executor.rank(item.made, self._ending))

        self._sorted.extend(sorted(self._new, key=rank, reverse=self._down and not self._ending))
        self._new.clear()
        self._down = not self._down


def _may_pass(result: Any) -> bool:
    """Whether a result is an error that another try may not meet."""
    return isinstance(result, JitneyError) and result.code in ("UNAVAILABLE", "INTERNAL")
