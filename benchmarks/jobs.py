"""What do jobs (``jitney batch``) cost beside the engine alone, a loop by hand and other tools, and
do they keep what they promise: memory that does not grow, and each row once whatever kills them?

    python -m benchmarks.jobs --what generate embed digits      # rates, each against its bar
    python -m benchmarks.jobs --what ray ray_digits ray_large   # the same on a Ray cluster
    python -m benchmarks.jobs --what memory kills nodes       # promises

Each contender runs in a process of its own; they take turns, and a ratio is of one turn. A job's
seconds count from the end of loading to its end: reading and writing Parquet are in them. With Ray,
and of what is held against it, they count from the first part on. Ray's workers get the niceness of
all other processes here.
"""

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.engines.measure import MARK
from benchmarks.job_contenders import (
    ENGINE,
    FIRST_DIGITS,
    GREEDY,
    MODELS,
    STATIC_BATCH,
    run_contender,
)
from benchmarks.workloads import VOCAB_SIZE, save_m100, w1

DIGITS_BATCH = 128
LARGE_BYTES = 500_000
ROOT = Path(__file__).resolve().parent.parent
PYLM = MODELS / "pylm" / "1" / "checkpoint"

# --------------------------------------------------------------------------- inputs


def write_prompts(path: Path, turns: int, count: int | None = None) -> Path:
    """W1 so many times, each time with other tokens, so that no prefix is in the cache: columns
    ``text``, a word a token, and ``max_tokens``; the first ``count`` of them."""
    workload = w1()
    rng = np.random.RandomState(7)
    rows = [
        (" ".join(f"w{i}" for i in rng.randint(10, VOCAB_SIZE - 10, len(prompt))), length)
        for _ in range(turns)
        for prompt, length in zip(workload.prompts, workload.output_lengths, strict=True)
    ][:count]
    texts, lengths = zip(*rows, strict=True)
    return _write(path, {"text": list(texts), "max_tokens": list(lengths)})


def write_texts(path: Path, count: int) -> Path:
    """Texts of 2 to 150 words, half of them of at most 12, out of the words of our pages."""
    words = " ".join(page.read_text("utf-8") for page in sorted((ROOT / "docs").glob("*.md")))
    rng = np.random.RandomState(8)
    known = np.array(words.split())
    lengths = np.clip(rng.lognormal(2.5, 0.7, count), 2, 150).astype(int)
    return _write(path, {"text": [" ".join(rng.choice(known, length)) for length in lengths]})


def _write(path: Path, columns: dict[str, Any]) -> Path:
    ids = {"id": list(range(len(next(iter(columns.values())))))}
    pq.write_table(pa.table({**ids, **columns}), path)
    return path


def words_checkpoint(folder: Path) -> Path:
    """m100 with a tokenizer, which a job needs: token i is the word ``w<i>``."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    model = save_m100(folder / "m100-words")
    if not (model / "tokenizer.json").exists():
        words = {f"w{i}": i for i in range(VOCAB_SIZE)}
        tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(model)
    return model


def start(task: dict[str, Any]) -> subprocess.Popen[str]:
    """A process of a contender."""
    words = [sys.executable, "-m", "benchmarks.jobs", "--child", json.dumps(task)]
    pipe = subprocess.PIPE
    environment = {**os.environ, "RAY_worker_niceness": "0"}
    return subprocess.Popen(words, cwd=ROOT, stdout=pipe, stderr=pipe, text=True, env=environment)


def measure(contender: str, **task: Any) -> dict[str, float]:
    """Its seconds and CPU seconds. Raises RuntimeError with the end of its errors."""
    if contender == "job":
        shutil.rmtree(task["settings"]["output"], ignore_errors=True)
    output, errors = start({"contender": contender, **task}).communicate()
    for line in output.splitlines():
        if line.startswith(MARK):
            found: dict[str, float] = json.loads(line.removeprefix(MARK))
            return found
    raise RuntimeError(f"{contender} failed:\n{errors[-3000:]}")


# --------------------------------------------------------------------------- rates


def _turns(repeats: int, unit: str, contenders: dict[str, Callable[[], dict[str, float]]]) -> None:
    """Run the contenders in turn, and print a table: rates, and the first's divided by each."""
    found: dict[str, list[dict[str, float]]] = {name: [] for name in contenders}
    for turn in range(repeats):
        for name in list(contenders)[:: -1 if turn % 2 else 1]:
            found[name].append(contenders[name]())
            print(f"  {name}: {found[name][-1]}", file=sys.stderr, flush=True)
    first = next(iter(contenders))
    print(f"| contender | s | {unit} | {first} ÷ it | by CPU seconds | turn by turn |")
    print("|---|---|---|---|---|---|")
    for name, runs in found.items():
        pairs = list(zip(found[first], runs, strict=True))
        wall = [_rate(ours) / _rate(run) for ours, run in pairs]
        cpu = [_rate(ours, "cpu_s") / _rate(run, "cpu_s") for ours, run in pairs]
        seconds, rate = (
            statistics.median(map(of, runs)) for of in (lambda run: run["seconds"], _rate)
        )
        by_turn = ", ".join(f"{each:.2f}" for each in wall)
        ratios = f"{statistics.median(wall):.2f} | {statistics.median(cpu):.2f}"
        print(f"| {name} | {seconds:.1f} | {rate:,.1f} | {ratios} | {by_turn} |")


def _rate(run: dict[str, float], per: str = "seconds") -> float:
    """The amount of work for each second; no number where the seconds are not known."""
    return run["amount"] / run.get(per, float("nan"))


def _generate_job(source: Path, output: Path, model: Path, **more: Any) -> dict[str, float]:
    settings = {"input": str(source), "output": str(output), "model": str(model)}
    tokens = {"sampling": GREEDY, "sampling_column": ["max_tokens"], "engine": ENGINE}
    return measure("job", settings=settings | tokens | more)


def generate(arguments: argparse.Namespace, folder: Path) -> None:
    """A job over W1 repeated, the engine alone over the same, transformers over its head."""
    model = words_checkpoint(folder)
    source = write_prompts(folder / "prompts.parquet", arguments.w1_turns)
    total = sum(w1().output_lengths)
    few = {"amount": total * arguments.static_turns}
    amount = {"amount": total * arguments.w1_turns}
    task = {"input": str(source), "model": str(model)}
    static = {"rows": len(w1().prompts) * arguments.static_turns}
    _turns(arguments.repeats, "output tokens/s", {
        "job": lambda: _generate_job(source, folder / "generate-out", model) | amount,
        "jitney.LLM": lambda: measure("jitney_llm", **task) | amount,
        f"transformers generate, static batches of {STATIC_BATCH}":
            lambda: measure("transformers_static", **task, **static) | few,
    })  # fmt: skip


def embed(arguments: argparse.Namespace, folder: Path) -> None:
    """A job over texts, the loop by hand, sentence-transformers: float32 all."""
    source = write_texts(folder / "texts.parquet", arguments.texts)
    settings = {"input": str(source), "output": str(folder / "embed-out"), "task": "embed"}
    settings["model"] = str(MODELS / "minilm")
    amount = {"amount": arguments.texts}
    task = {"input": str(source), "output": str(folder / "embeddings.parquet")}
    _turns(arguments.repeats, "texts/s", {
        "job": lambda: measure("job", settings=settings) | amount,
        "ONNX Runtime, by hand": lambda: measure("onnx_loop", **task) | amount,
        "sentence-transformers": lambda: measure("sentence_transformers", **task) | amount,
    })  # fmt: skip


def write_images(path: Path, rows: int) -> Path:
    """Images of digits, 64 numbers each."""
    pixels = np.random.RandomState(9).randint(0, 17, rows * 64).astype(np.uint8)
    return _write(path, {"image": pa.FixedSizeListArray.from_arrays(pixels, 64)})


def _digits_settings(source: Path, output: Path) -> dict[str, Any]:
    settings = {"input": str(source), "output": str(output), "model": str(MODELS / "digits")}
    return settings | {"task": "classify", "column": "image"}


def digits(arguments: argparse.Namespace, folder: Path) -> None:
    """A job of a small model, whose rows cost little but what is around it, and ten lines that do
    the same at equal batch size. The bar: at least 0.7 of their rate."""
    source = write_images(folder / "images.parquet", arguments.images)
    settings = _digits_settings(source, folder / "digits-out") | {"batch_size": DIGITS_BATCH}
    amount = {"amount": arguments.images}
    task = {"input": str(source), "output": str(folder / "digits.parquet")}
    _turns(arguments.repeats, "rows/s", {
        "job": lambda: measure("job", settings=settings) | amount,
        "ONNX Runtime, ten lines":
            lambda: measure("digits_loop", batch_size=DIGITS_BATCH, **task) | amount,
    })  # fmt: skip


def _after_first_part(output: Path, figure: str | None = None) -> dict[str, float]:
    """What a job did after its first part was committed, and the seconds of that: the start of a
    cluster and of its actors is not in them. ``figure``: the amount, else rows."""
    from jitney_jobs.job_record import read_record

    record = read_record(str(output), None)
    first, *rest = record.parts
    assert record.end is not None, "the job is complete"
    amount = float(sum(part.written + part.failed for part in rest))
    if figure is not None:
        amount = record.parts[-1].figures[figure] - first.figures[figure]
    return {"amount": amount, "seconds": record.end.at - first.figures["at"]}


def ray(arguments: argparse.Namespace, folder: Path) -> None:
    """A job of a language model on a local cluster of Ray's against the same without. The bar: at
    least 0.9."""
    model = words_checkpoint(folder)
    source = write_prompts(folder / "prompts.parquet", arguments.w1_turns)
    output = folder / "ray-out"

    def run(**more: Any) -> dict[str, float]:
        _generate_job(source, output, model, part_seconds=5.0, **more)
        return _after_first_part(output, "tokens")

    local = partial(run, ray="local")
    _turns(arguments.repeats, "output tokens/s", {"job --ray local": local, "job": run})


def ray_digits(arguments: argparse.Namespace, folder: Path) -> None:
    """The job of ``digits`` on a local cluster of Ray's, Ray's own ``map_batches``, and the job
    without Ray. The bar: at least 0.8 of Ray's own."""
    source = write_images(folder / "images.parquet", arguments.images)
    output = folder / "ray-out"

    def job(**more: Any) -> dict[str, float]:
        settings = _digits_settings(source, output) | {"batch_size": DIGITS_BATCH, **more}
        measure("job", settings=settings)
        return _after_first_part(output)

    def alone() -> dict[str, float]:
        stamps = folder / "stamps"
        stamps.unlink(missing_ok=True)
        task = {"input": str(source), "output": str(folder / "digits-ray"), "stamps": str(stamps)}
        measure("digits_ray", batch_size=DIGITS_BATCH, **task)
        began, ended = map(float, stamps.read_text().split())
        return {"amount": arguments.images - FIRST_DIGITS, "seconds": ended - began}

    _turns(arguments.repeats, "rows/s", {
        "job --ray local": partial(job, ray="local"),
        "Ray Data, map_batches": alone,
        "job": job,
    })  # fmt: skip


def ray_large(arguments: argparse.Namespace, folder: Path) -> None:
    """Rows of half a megabyte through a function, on a local cluster of Ray's and without. The bar:
    at least 0.7."""
    source = _write_large(folder / "large.parquet", arguments.large_rows)
    output = folder / "ray-out"
    settings = {"input": str(source), "output": str(output), "task": "map"}
    settings["map"] = "benchmarks.job_contenders:length"

    def job(**more: Any) -> dict[str, float]:
        measure("job", settings=settings | more)
        return _after_first_part(output)

    contenders = {"job --ray local": partial(job, ray="local"), "job": job}
    _turns(arguments.repeats, "rows/s", contenders)


def _write_large(path: Path, rows: int) -> Path:
    """Texts of half a megabyte, each with its own words."""
    rng = np.random.RandomState(10)
    words = rng.randint(0, 10**9, (rows, LARGE_BYTES // 10))
    return _write(path, {"text": [" ".join(f"{word:09}" for word in row) for row in words]})


# --------------------------------------------------------------------------- promises


def _pss_mb(process: psutil.Process) -> float:
    """Proportional set size of a process and those below it."""
    total = 0
    for each in (process, *process.children(recursive=True)):
        try:
            total += each.memory_full_info().pss
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue  # it has ended
    return total / 1e6


def memory(arguments: argparse.Namespace, folder: Path) -> None:
    """Peak memory of a job by its number of rows."""
    print("| rows | peak PSS of all processes, MB | beside the first | s |\n|---|---|---|---|")
    peaks: list[float] = []
    for rows in arguments.rows:
        source = write_images(folder / "images.parquet", rows)
        output = folder / "memory-out"
        shutil.rmtree(output, ignore_errors=True)
        settings = _digits_settings(source, output)
        began = time.monotonic()
        peak = 0.0
        child = start({"contender": "job", "settings": settings})
        process = psutil.Process(child.pid)
        while child.poll() is None:
            peak = max(peak, _pss_mb(process))
            time.sleep(0.1)
        if child.returncode:
            raise RuntimeError(f"the job failed:\n{child.communicate()[1][-3000:]}")
        _check_ids(output, rows)
        peaks.append(peak)
        seconds = time.monotonic() - began
        print(f"| {rows:,} | {peak:,.0f} | {peak / peaks[0]:.3f} | {seconds:.0f} |", flush=True)


def _check_ids(output: Path, rows: int) -> None:
    """Raise RuntimeError unless the output has each id from 0 on once, and no row is bad."""
    parts = sorted(output.glob("part-*.parquet"))
    ids = Counter(
        i for part in parts for i in pq.read_table(part, columns=["id"])["id"].to_pylist()
    )
    wrong = {i: n for i, n in ids.items() if n != 1 or not 0 <= i < rows}
    bad = [*(output / "_errors").glob("part-*")]
    if wrong or len(ids) != rows or bad:
        raise RuntimeError(f"{len(ids)} of {rows} ids, wrong {wrong}, bad rows in {bad}")


def kills(arguments: argparse.Namespace, folder: Path) -> None:
    """Kill a job again and again: half of the times while it starts, else while it works."""
    chance = random.Random(arguments.seed)
    rows = arguments.kill_rows
    texts = [f"def function_{i}(" for i in range(rows)]
    source = _write(folder / "short.parquet", {"text": texts})
    output = folder / "kills-out"
    shutil.rmtree(output, ignore_errors=True)
    settings: dict[str, Any] = {"input": str(source), "output": str(output), "model": str(PYLM)}
    settings |= {"max_tokens": 24, "part_seconds": 0.5}
    stamps = folder / "stamps"
    times = list[float]()
    kinds = Counter[str]()
    for number in range(arguments.kills + 1):
        stamps.write_text("")
        resumes = (output / "_job" / "journal.jsonl").exists()
        began = time.time()
        last = number == arguments.kills
        child = start({"contender": "job", "settings": settings, "stamps": str(stamps)})
        if not last and chance.random() < 0.5:
            time.sleep(chance.uniform(0, arguments.start_s))
        elif not last:
            while "work" not in stamps.read_text() and child.poll() is None:
                time.sleep(0.01)
            time.sleep(chance.uniform(0, arguments.work_s))
        if not last:
            child.kill()
        _, errors = child.communicate()
        if child.returncode not in ((0,) if last else (-9,)):
            raise RuntimeError(f"run {number} ended with {child.returncode}:\n{errors[-3000:]}")
        at = {name: float(t) for name, t in map(str.split, stamps.read_text().splitlines())}
        kinds["working" if "work" in at else "loading" if "load" in at else "starting"] += not last
        if "work" in at and resumes:
            times.append(at["load"] - began + at["work"] - at["loaded"])
            print(f"  run {number}: resumed in {times[-1]:.2f} s", file=sys.stderr, flush=True)
    _check_ids(output, rows)
    p50, p95 = np.percentile(times, [50, 95])
    print(f"{arguments.kills} kills ({dict(kinds)}): {rows:,} rows, each once")
    print(
        f"{len(times)} resumed to work: p50 {p50:.2f} s, p95 {p95:.2f} s, most {max(times):.2f} s"
    )


def nodes(arguments: argparse.Namespace, folder: Path) -> None:
    """Kill a node of a cluster of two again and again, and let a new one join, while jobs run."""
    from ray.cluster_utils import Cluster

    chance = random.Random(arguments.seed)
    rows = arguments.kill_rows
    killed = 0
    jobs = 0
    texts = [f"def function_{i}(" for i in range(rows)]
    sources = folder / "many"
    sources.mkdir(exist_ok=True)
    for file in range(20):
        ids = list(range(file, rows, 20))
        table = pa.table({"id": ids, "text": [texts[i] for i in ids]})
        pq.write_table(table, sources / f"{file}.parquet")
    quick = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 1000}
    node: dict[str, Any] = {"num_cpus": 2, "object_store_memory": 200 << 20}
    cluster = Cluster(
        initialize_head=True,
        head_node_args={**node, "include_dashboard": False, "_system_config": quick},
    )
    output = folder / "nodes-out"
    settings: dict[str, Any] = {"input": str(sources), "output": str(output), "model": str(PYLM)}
    settings |= {"max_tokens": 24, "part_seconds": 0.5, "ray": cluster.address}
    seconds: list[float] = []
    while killed < arguments.kills:
        shutil.rmtree(output, ignore_errors=True)
        began = time.monotonic()
        jobs += 1
        child = start({"contender": "job", "settings": settings})
        while child.poll() is None and killed < arguments.kills:
            other = cluster.add_node(**node)
            time.sleep(chance.uniform(1, arguments.node_s))
            if child.poll() is None:
                killed += 1
                print(f"  job {jobs}: node {killed} killed", file=sys.stderr, flush=True)
            cluster.remove_node(other, allow_graceful=False)
        _, errors = child.communicate()
        if child.returncode:
            raise RuntimeError(f"job {jobs} ended with {child.returncode}:\n{errors[-3000:]}")
        _check_ids(output, rows)
        seconds.append(time.monotonic() - began)
    cluster.shutdown()
    took = ", ".join(f"{each:.0f}" for each in seconds)
    print(f"{killed} kills of a node, {jobs} jobs ({took} s): {rows:,} rows in each, each once")


_ALL = (generate, embed, digits, ray, ray_digits, ray_large, memory, kills, nodes)
WHAT = {each.__name__: each for each in _ALL}


def main() -> None:
    """Run the parts that were asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--what", nargs="+", choices=WHAT, default=list(WHAT))
    parser.add_argument("--repeats", type=int, default=3, help="turns of rates")
    parser.add_argument("--w1-turns", type=int, default=30, help="W1 so many times: generate, ray")
    parser.add_argument("--static-turns", type=int, default=3, help="the same for transformers")
    parser.add_argument("--texts", type=int, default=20_000, help="of embed")
    parser.add_argument("--images", type=int, default=300_000, help="rows of digits")
    parser.add_argument("--large-rows", type=int, default=1000, help="of ray_large")
    parser.add_argument("--rows", type=int, nargs="+", default=[10_000, 1_000_000], help="memory")
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--kill-rows", type=int, default=10_000)
    parser.add_argument("--start-s", type=float, default=5.0, help="kills of a start: within that")
    parser.add_argument("--work-s", type=float, default=3.0, help="kills at work: within that")
    parser.add_argument("--node-s", type=float, default=12.0, help="a node is killed within that")
    parser.add_argument("--seed", type=int, default=0, help="of the kills' moments")
    parser.add_argument("--work-dir", type=Path, default=ROOT / "build" / "benchmarks")
    parser.add_argument("--child", type=json.loads, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        run_contender(arguments.child)
        return
    folder = arguments.work_dir.resolve() / "jobs"
    folder.mkdir(parents=True, exist_ok=True)
    for name in arguments.what:
        print(f"{name}\n", flush=True)
        WHAT[name](arguments, folder)
        print(flush=True)


if __name__ == "__main__":
    main()
