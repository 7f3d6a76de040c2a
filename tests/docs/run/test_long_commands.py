"""Commands of the pages that take long, run with smaller settings: what they print is worth nothing
as a measurement, but it is printed."""

import subprocess
from pathlib import Path

import pytest

LIMIT_S = 600

SMALL = [
    ("benchmarks.scheduler", "--running 16 --waiting 0 --steps 5", "schedule"),
    (
        "benchmarks.engine",
        "--engines jitney,transformers_static --workloads W1 --requests 2 --repeats 1 --breakdown",
        "tok/s",
    ),
    (  # the model is what the one before made
        "benchmarks.engines.jitney",
        "--model build/benchmarks/m100 --threads 2 --breakdown --layerwise --workloads W1 "
        "--requests 2",
        "attention",
    ),
    ("benchmarks.attention", "--quick --threads 2", "decodes"),
    ("benchmarks.served", "--requests 2 --streams 2 --repeats 1", "tok/s"),
    ("benchmarks.dynamic_batching", "--quick --only overhead", "|"),
    ("benchmarks.batching_modes", "--quick --parts digits --pictures build/pictures", "|"),
    ("benchmarks.perplexity", "--tokens 256 --quantization none int8 --cache int8", "| int8 |"),
    (
        "benchmarks.kinds",
        "--sizes small --kinds lfm2 --workloads W2 --pairs 1",
        "| small | lfm2 |",
    ),
    ("benchmarks.loading", "--quantization none --repeats 1 --threads 1", "| m100 |"),
    ("benchmarks.architectures.speed", "--types gemma2 --turns 1", "| gemma2 |"),
]


def run(scratch: Path, variables: dict[str, str], *words: str) -> str:
    done = subprocess.run(
        ["python", *words],
        cwd=scratch,
        env=variables,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


@pytest.mark.parametrize(("module", "words", "said"), SMALL, ids=[row[0] for row in SMALL])
def test_a_benchmark(
    module: str, words: str, said: str, scratch: Path, variables: dict[str, str]
) -> None:
    assert said in run(scratch, variables, "-m", module, *words.split())


def test_training(scratch: Path, variables: dict[str, str]) -> None:
    words = ("--steps", "1", "--batch-tokens", "1024", "--output", "build/trained", "--no-compile")
    run(scratch, variables, "scripts/train_demo_model.py", *words)
    assert (scratch / "build" / "trained" / "model.safetensors").is_file()
