"""The figures of ``benchmarks.dynamic_batching``: what is run for each, and its row.

Owns the repository of one server start with every variant that they need, and the order of runs:
what is compared takes turns, and a figure is the median of its turns.
"""

import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from benchmarks.batching.direct import Direct, run_direct
from benchmarks.batching.perf_analyzer import Load, Report, write_rows, write_texts
from benchmarks.batching.repository import Variant, set_window, write_config, write_variant
from benchmarks.batching.subjects import ROOT, Subject, sentences

CONCURRENCIES = (1, 4, 16, 32)
SATURATED_BATCH = 32
TOKENIZER = "minilm_tokenizer"

Measured = Report | Direct


@dataclass
class Bench:
    """What every figure needs. ``repeats`` turns of about ``seconds`` each."""

    folder: Path
    binary: Path
    subjects: dict[str, Subject]
    threads: int
    repeats: int
    seconds: float
    url: str = ""
    _files: dict[str, Path] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, subject in self.subjects.items():
            self._files[name] = write_rows(self.folder / f"{name}.json", subject)
            np.savez(self.folder / f"{name}.npz", **subject.rows)
        self._files["embed"] = write_texts(self.folder / "embed.json", "text", sentences(64))

    def served(
        self, model: str, inputs: str, concurrency: int, batch: int = 1
    ) -> Callable[[], Report]:
        """Runs of perf_analyzer on a model with the inputs of a subject, or of ``embed``."""
        load = Load(self.url, model, self._files[inputs], concurrency, batch)
        return lambda: load.run(self.binary, self.seconds)

    def direct(self, name: str, batch: int, threads: int) -> Callable[[], Direct]:
        """Runs of ONNX Runtime alone on a subject's model and rows."""
        model, rows = self.subjects[name].onnx, self.folder / f"{name}.npz"
        return lambda: run_direct(model, rows, batch=batch, threads=threads, seconds=self.seconds)

    def in_turn(self, runs: Sequence[Callable[[], Measured]]) -> list[list[Measured]]:
        """Each run ``repeats`` times, one after the other and again; the results of each."""
        results: list[list[Measured]] = [[] for _ in runs]
        for _ in range(self.repeats):
            for result, run in zip(results, runs, strict=True):
                result.append(run())
                print(".", end="", file=sys.stderr, flush=True)
        return results


def write_repository(bench: Bench) -> Path:
    """Every variant: as shipped, without a batcher, with one thread, and both ensembles."""
    repository = bench.folder / "models"
    for subject in bench.subjects.values():
        config = subject.config()
        shipped = config.dynamic_batching.max_queue_delay_microseconds
        size = max(config.max_batch_size, SATURATED_BATCH)
        for threads in {1, bench.threads}:
            name = f"{subject.name}_{threads}"
            for suffix, window in (("none", None), ("dynamic", shipped)):
                variant = Variant(f"{name}_{suffix}", size, window, threads)
                write_variant(repository, subject.folder, config, variant)
    for suffix in ("none", "dynamic"):
        _write_ensemble(repository, bench.threads, suffix)
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


def batching(bench: Bench) -> str:
    """Dynamic batching as shipped against none, one row a request."""
    lines = [
        "| model | at once | none: rows/s · p50 / p95 / p99, ms | "
        "dynamic: rows/s · p50 / p95 / p99, ms | ratio |",
        "|---|---|---|---|---|",
    ]
    for name, model in (("digits", f"digits_{bench.threads}"), ("embed", "embed")):
        for concurrency in CONCURRENCIES:
            none, dynamic = bench.in_turn(
                [
                    bench.served(f"{model}_none", name, concurrency),
                    bench.served(f"{model}_dynamic", name, concurrency),
                ]
            )
            ratio = _rows_per_s(dynamic) / _rows_per_s(none)
            lines.append(
                f"| {name} | {concurrency} | {_report(none)} | {_report(dynamic)} | {ratio:.2f} |"
            )
    return "\n".join(lines)


def saturation(bench: Bench) -> str:
    """The stand-in with full batches against ONNX Runtime alone, on as many threads."""
    batch = SATURATED_BATCH
    lines = [
        f"| model, threads | direct, batches of {batch}: rows/s | "
        f"served, requests of {batch} rows, 2 at once (ratio) | "
        f"served, requests of 1 row, {4 * batch} at once, batched by the server (ratio) |",
        "|---|---|---|---|",
    ]
    for name, threads in (("minilm", 1), ("minilm", bench.threads), ("digits", 1)):
        model = f"{name}_{threads}"
        results = bench.in_turn(
            [
                bench.direct(name, batch, threads),
                bench.served(f"{model}_none", name, 2, batch),
                bench.served(f"{model}_dynamic", name, 4 * batch),
            ]
        )
        direct, whole, single = map(_rows_per_s, results)
        lines.append(
            f"| {name}, {threads} | {direct:,.0f} | {whole:,.0f} ({whole / direct:.2f}) | "
            f"{single:,.0f} ({single / direct:.2f}) |"
        )
    return "\n".join(lines)


def precision(bench: Bench, texts: Subject, texts_int8: Subject) -> str:
    """int8 against fp32: speed by both ways of running, and how alike the embeddings are.

    The last two hold the same texts' embeddings in ``expected``.
    """
    batch = SATURATED_BATCH
    lines = [
        "| encoder | fp32: rows/s | int8: rows/s | ratio |",
        "|---|---|---|---|",
    ]
    for rows in (1, batch):
        fp32, int8 = bench.in_turn(
            [bench.direct(name, rows, bench.threads) for name in ("minilm", "minilm_int8")]
        )
        lines.append(_ratio_line(f"direct, batches of {rows}", fp32, int8))
    fp32, int8 = bench.in_turn(
        [
            bench.served(f"{name}_{bench.threads}_none", name, 2, batch)
            for name in ("minilm", "minilm_int8")
        ]
    )
    lines.append(_ratio_line(f"served, requests of {batch} rows, 2 at once", fp32, int8))
    cosines = (texts.expected * texts_int8.expected).sum(1)
    cosines /= np.linalg.norm(texts.expected, axis=1) * np.linalg.norm(texts_int8.expected, axis=1)
    lines += [
        "",
        f"Cosine of the int8 to the fp32 embeddings of {len(cosines)} sentences: smallest "
        f"{cosines.min():.4f}, mean {cosines.mean():.4f}.",
    ]
    return "\n".join(lines)


def overhead(bench: Bench) -> str:
    """One request of one row at a time, against the call alone."""
    lines = [
        "| model | direct call p50, ms | none p50, ms (more) | dynamic as shipped p50, ms (more) |",
        "|---|---|---|---|",
    ]
    for name in ("digits", "minilm"):
        model = f"{name}_{bench.threads}"
        results = bench.in_turn(
            [
                bench.direct(name, 1, bench.threads),
                bench.served(f"{model}_none", name, 1),
                bench.served(f"{model}_dynamic", name, 1),
            ]
        )
        direct, none, dynamic = (statistics.median(run.p50_ms for run in runs) for runs in results)
        lines.append(
            f"| {name} | {direct:.2f} | {none:.2f} ({none - direct:+.2f}) | "
            f"{dynamic:.2f} ({dynamic - direct:+.2f}) |"
        )
    return "\n".join(lines)


def _rows_per_s(runs: Sequence[Measured]) -> float:
    return statistics.median(run.rows_per_s for run in runs)


def _report(runs: Sequence[Measured]) -> str:
    p50, p95, p99 = (
        statistics.median(getattr(run, name) for run in runs)
        for name in ("p50_ms", "p95_ms", "p99_ms")
    )
    return f"{_rows_per_s(runs):,.0f} · {p50:.1f} / {p95:.1f} / {p99:.1f}"


def _ratio_line(name: str, first: Sequence[Measured], second: Sequence[Measured]) -> str:
    a, b = _rows_per_s(first), _rows_per_s(second)
    return f"| {name} | {a:,.0f} | {b:,.0f} | {b / a:.2f} |"
