"""The figures of ``benchmarks.dynamic_batching``: what is run for each, and its row.

Owns the repository of one server start with every variant that they need, and the order of runs:
what is compared takes turns, and a figure is the median of its turns.
"""

import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from google.protobuf import text_format
from jitney_measure.record import Load
from jitney_measure.target import Target
from tritonclient.grpc import model_config_pb2

from benchmarks.batching.direct import run_direct
from benchmarks.batching.loads import Bench, Mode
from benchmarks.batching.repository import Variant, set_window, write_config, write_variant
from benchmarks.batching.requests import write_rows, write_texts
from benchmarks.batching.subjects import ROOT, Subject, sentences
from benchmarks.batching.tables import header, line

CONCURRENCIES = (1, 4, 16, 32)
SATURATED_BATCH = 32
TOKENIZER = "minilm_tokenizer"


class Run(NamedTuple):
    """What one turn gave; without a server there is only the median."""

    rows_per_s: float
    p50_ms: float
    p95_ms: float = 0.0
    p99_ms: float = 0.0


class Setup:
    """What every figure needs: the files of its requests, and its runs of about ``seconds`` each,
    ``repeats`` turns of them."""

    def __init__(
        self, folder: Path, subjects: dict[str, Subject], threads: int, repeats: int, seconds: float
    ) -> None:
        self.folder = folder
        self.subjects = subjects
        self.threads = threads
        self._repeats = repeats
        self._seconds = seconds
        self._bench = Bench(folder)
        self._target: Target | None = None
        self._files = {"embed": write_texts(folder / "embed.json", "text", sentences(64))}
        for name, subject in subjects.items():
            self._files[name] = write_rows(folder / f"{name}.json", subject)
            np.savez(folder / f"{name}.npz", **subject.rows)

    def use(self, target: Target) -> None:
        """The server is there."""
        self._target = target

    def served(self, model: str, inputs: str, at_once: int, rows: int = 1) -> Callable[[], Run]:
        """Runs of perf_analyzer on a model with the inputs of a subject, or of ``embed``."""
        assert self._target is not None
        mode = Mode(
            target=self._target,
            model=self._target.model(model),
            data=self._files[inputs],
            rows=rows,
        )

        def run() -> Run:
            found = self._bench.run(mode, Load("concurrency", at_once), self._seconds).measured
            assert found is not None
            times = [1e3 * found.latency.at(percent) for percent in (50, 95, 99)]
            return Run(found.throughput, *times)

        return run

    def direct(self, name: str, batch: int, threads: int) -> Callable[[], Run]:
        """Runs of ONNX Runtime alone on a subject's model and rows."""
        model = self.subjects[name].onnx
        rows = self.folder / f"{name}.npz"

        def run() -> Run:
            made = run_direct(model, rows, batch=batch, threads=threads, seconds=self._seconds)
            print(".", end="", file=sys.stderr, flush=True)
            return Run(made.rows_per_s, made.p50_ms)

        return run

    def in_turn(self, runs: Sequence[Callable[[], Run]]) -> list[Run]:
        """Each run ``repeats`` times, one after the other and again; the medians of each."""
        turns = [[run() for run in runs] for _ in range(self._repeats)]
        medians = []
        for index in range(len(runs)):
            columns = zip(*(turn[index] for turn in turns), strict=True)
            medians.append(Run(*map(statistics.median, columns)))
        return medians


def write_repository(setup: Setup) -> Path:
    """Every variant: as shipped, without a batcher, with one thread, and both ensembles."""
    repository = setup.folder / "models"
    for subject in setup.subjects.values():
        config = subject.config()
        shipped = config.dynamic_batching.max_queue_delay_microseconds
        size = max(config.max_batch_size, SATURATED_BATCH)
        for threads in {1, setup.threads}:
            name = f"{subject.name}_{threads}"
            for suffix, window in (("none", None), ("dynamic", shipped)):
                variant = Variant(f"{name}_{suffix}", size, window, threads)
                write_variant(repository, subject.folder, config, variant)
    for suffix in ("none", "dynamic"):
        _write_ensemble(repository, setup.threads, suffix)
    return repository


def _write_ensemble(repository: Path, threads: int, suffix: str) -> None:
    """``embed`` over a tokenizer and an encoder that both batch, or that both do not."""
    source = ROOT / "model_repository"
    tokenizer = _read_config(source / TOKENIZER)
    tokenizer.name = f"{TOKENIZER}_{suffix}"
    if suffix == "none":
        set_window(tokenizer, None)
    folder = repository / tokenizer.name
    folder.mkdir()
    (folder / "1").symlink_to((source / TOKENIZER / "1").resolve())
    write_config(folder, tokenizer)
    ensemble = _read_config(source / "embed")
    ensemble.name = f"embed_{suffix}"
    names = {TOKENIZER: tokenizer.name, "minilm": f"minilm_{threads}_{suffix}"}
    for step in ensemble.ensemble_scheduling.step:
        step.model_name = names[step.model_name]
    folder = repository / ensemble.name
    (folder / "1").mkdir(parents=True)
    write_config(folder, ensemble)


def _read_config(folder: Path) -> model_config_pb2.ModelConfig:
    text = (folder / "config.pbtxt").read_text(encoding="utf-8")
    config: model_config_pb2.ModelConfig = text_format.Parse(text, model_config_pb2.ModelConfig())
    return config


# --------------------------------------------------------------------------- the figures


def batching(setup: Setup) -> str:
    """Dynamic batching as shipped against none, one row a request."""
    cells = "rows/s · p50 / p95 / p99, ms"
    lines = [header(["model", "at once", f"none: {cells}", f"dynamic: {cells}", "ratio"])]
    for name, model in (("digits", f"digits_{setup.threads}"), ("embed", "embed")):
        for at_once in CONCURRENCIES:
            none, dynamic = setup.in_turn(
                [
                    setup.served(f"{model}_none", name, at_once),
                    setup.served(f"{model}_dynamic", name, at_once),
                ]
            )
            ratio = f"{dynamic.rows_per_s / none.rows_per_s:.2f}"
            lines.append(line([name, str(at_once), _report(none), _report(dynamic), ratio]))
    return "\n".join(lines)


def saturation(setup: Setup) -> str:
    """The stand-in with full batches against ONNX Runtime alone, on as many threads."""
    batch = SATURATED_BATCH
    lines = [
        header(
            [
                "model, threads",
                f"direct, batches of {batch}: rows/s",
                f"served, requests of {batch} rows, 2 at once (ratio)",
                f"served, requests of 1 row, {4 * batch} at once, batched by the server (ratio)",
            ]
        )
    ]
    for name, threads in (("minilm", 1), ("minilm", setup.threads), ("digits", 1)):
        model = f"{name}_{threads}"
        direct, whole, single = setup.in_turn(
            [
                setup.direct(name, batch, threads),
                setup.served(f"{model}_none", name, 2, batch),
                setup.served(f"{model}_dynamic", name, 4 * batch),
            ]
        )
        cells = [f"{name}, {threads}", f"{direct.rows_per_s:,.0f}"]
        for served in (whole, single):
            ratio = served.rows_per_s / direct.rows_per_s
            cells.append(f"{served.rows_per_s:,.0f} ({ratio:.2f})")
        lines.append(line(cells))
    return "\n".join(lines)


def precision(setup: Setup, texts: Subject, texts_int8: Subject) -> str:
    """int8 against fp32: speed by both ways of running, and how alike the embeddings are.

    The last two hold the same texts' embeddings in ``expected``.
    """
    batch = SATURATED_BATCH
    names = ("minilm", "minilm_int8")
    ways = {
        f"direct, batches of {rows}": [setup.direct(name, rows, setup.threads) for name in names]
        for rows in (1, batch)
    }
    ways[f"served, requests of {batch} rows, 2 at once"] = [
        setup.served(f"{name}_{setup.threads}_none", name, 2, batch) for name in names
    ]
    lines = [header(["encoder", "fp32: rows/s", "int8: rows/s", "ratio"])]
    for way, runs in ways.items():
        fp32, int8 = setup.in_turn(runs)
        ratio = f"{int8.rows_per_s / fp32.rows_per_s:.2f}"
        lines.append(line([way, f"{fp32.rows_per_s:,.0f}", f"{int8.rows_per_s:,.0f}", ratio]))

    cosines = (texts.expected * texts_int8.expected).sum(1)
    cosines /= np.linalg.norm(texts.expected, axis=1)
    cosines /= np.linalg.norm(texts_int8.expected, axis=1)
    lines += [
        "",
        f"Cosine of the int8 to the fp32 embeddings of {len(cosines)} sentences: smallest "
        f"{cosines.min():.4f}, mean {cosines.mean():.4f}.",
    ]
    return "\n".join(lines)


def overhead(setup: Setup) -> str:
    """One request of one row at a time, against the call alone."""
    more = "p50, ms (more)"
    lines = [header(["model", "direct call p50, ms", f"none {more}", f"dynamic as shipped {more}"])]
    for name in ("digits", "minilm"):
        model = f"{name}_{setup.threads}"
        direct, none, dynamic = setup.in_turn(
            [
                setup.direct(name, 1, setup.threads),
                setup.served(f"{model}_none", name, 1),
                setup.served(f"{model}_dynamic", name, 1),
            ]
        )
        cells = [name, f"{direct.p50_ms:.2f}"]
        for served in (none, dynamic):
            cells.append(f"{served.p50_ms:.2f} ({served.p50_ms - direct.p50_ms:+.2f})")
        lines.append(line(cells))
    return "\n".join(lines)


def _report(run: Run) -> str:
    return f"{run.rows_per_s:,.0f} · {run.p50_ms:.1f} / {run.p95_ms:.1f} / {run.p99_ms:.1f}"
