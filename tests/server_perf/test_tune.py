"""Small runs of jitney tune on the real server, by the command that users give."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from jitney_measure import record
from jitney_measure.subject import read_subject

from tests.real_server.client import wait_until
from tests.signals import heed_signals
from tests.tiny_models import make_checkpoint

pytestmark = [pytest.mark.server, pytest.mark.usefixtures("binary")]

ROOT = Path(__file__).resolve().parents[2]
JITNEY = Path(sys.executable).parent / "jitney"
PRICE_S = 0.02
"""Of an execution, however many rows it has: batches pay."""

CONFIG = """# the user's own
backend: "python"
max_batch_size: 8
input [{ name: "x" data_type: TYPE_FP32 dims: [4] }]
output [{ name: "y" data_type: TYPE_FP32 dims: [4] }]
instance_group [{ kind: KIND_CPU count: 1 }]
"""
MODEL = f"""
import json
import time

import jitney.config  # the stub must see the environment that the launcher runs in
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        batching = json.loads(args["model_config"]).get("dynamic_batching", {{}})
        if batching.get("max_queue_delay_microseconds", 0) == 7000:
            raise pb_utils.TritonModelException("no window of seven")

    def execute(self, requests):
        time.sleep({PRICE_S})
        made = [pb_utils.get_input_tensor_by_name(each, "x").as_numpy() for each in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", rows)]) for rows in made]
"""


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "models"
    (folder / "slow/1").mkdir(parents=True)
    (folder / "slow/config.pbtxt").write_text(CONFIG, encoding="utf-8")
    (folder / "slow/1/model.py").write_text(MODEL, encoding="utf-8")
    return folder


def command(repository: Path, *words: str) -> list[str]:
    out = repository.parent / "out"
    return [str(JITNEY), "tune", *words, "--repository", str(repository), "--out", str(out)]


ENVIRONMENT = {**os.environ, "COLUMNS": "200", "NO_COLOR": "1"}


def tune(repository: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(repository, *words),
        env=ENVIRONMENT, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip


def files(folder: Path) -> dict[Path, bytes]:
    """What the user wrote; Python leaves its bytecode beside it."""
    return {
        path: path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def read_tuning(path: Path) -> record.Tuning:
    return msgspec.json.decode(path.read_bytes(), type=record.Tuning)


@pytest.mark.slow
def test_a_batching_model(repository: Path) -> None:
    """Eight rows in one execution cost as much as one: the batch wins, by far more than noise."""
    before = files(repository)
    done = tune(
        repository, "slow", "--slo", "latency-p95=2s", "--batch-sizes", "8",
        "--windows", "2ms,7ms", "--instances", "1", "--concurrency", "8", "--requests", "32",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert files(repository) == before, "the repository is only read"
    tuning = read_tuning(repository.parent / "out/tune.json")
    assert [tuple(trial.values.values()) for trial in tuning.trials] == [
        (1, 0, 1), (8, 2000, 1), (8, 7000, 1), (8, 2000, 1), (1, 0, 1),
    ]  # fmt: skip
    (refused,) = [trial for trial in tuning.trials if trial.failure]
    assert refused.values["window_us"] == 7000
    assert "no window of seven" in refused.failure
    choice = tuning.choice
    assert choice is not None
    assert (choice.values["batch_size"], choice.values["window_us"]) == (8, 2000)
    # One at a time is 50 rows/s at most.
    assert choice.before is not None
    assert choice.before < 1.05 / PRICE_S
    assert choice.throughput > 2 * choice.before
    (again,) = [t for t in tuning.trials if t.phase == "final" and t.values == choice.values]
    assert again.result is not None
    (stage,) = again.result.points[0].stages
    assert stage.mean_batch is not None
    assert stage.mean_batch > 3, "the server batched as it was told"
    check_output(repository, done.stdout, tuning)


def check_output(repository: Path, stdout: str, tuning: record.Tuning) -> None:
    """The lines on the terminal, pasted, are the setting; the files are there."""
    assert tuning.lines in stdout
    assert "in place of its instance_group and dynamic_batching, which are to be del" in stdout
    path = repository / "slow/config.pbtxt"
    kept = "\n".join(line for line in CONFIG.splitlines() if "instance_group" not in line)
    path.write_text(f"{kept}\n{tuning.lines}\n", encoding="utf-8")
    assert tuning.choice is not None
    assert read_subject(repository, "slow").current() == tuple(tuning.choice.values.values())
    out = repository.parent / "out"
    assert "slow, tuned" in (out / "report.html").read_text(encoding="utf-8")
    assert (out / "throughput.png").stat().st_size > 1000
    assert record.read(out / "current.json").title == "batch 1, window 0us, instances 1"
    assert record.read(out / "best.json").title == "batch 8, window 2000us, instances 1"


@pytest.mark.slow
def test_an_interruption_ends_the_server_and_keeps_the_rest(repository: Path) -> None:
    """Ctrl-C in the second setting: what was measured stands, nothing runs on."""
    words = command(
        repository, "slow", "--batch-sizes", "2,4,8", "--windows", "0", "--instances", "1",
        "--concurrency", "4", "--requests", "60",
    )  # fmt: skip
    file = repository.parent / "out/tune.json"
    with subprocess.Popen(
        words, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=heed_signals,
    ) as process:  # fmt: skip
        wait_until(lambda: file.exists() or process.poll() is not None, 180)
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=180)
    assert process.returncode == 130, stdout + stderr
    assert "Interrupted" in stdout
    tuning = read_tuning(file)
    assert tuning.ending == "interrupted"
    assert tuning.trials[0].result is not None
    assert len(tuning.trials) < 5
    pattern = f"tritonserver.*{repository}"
    wait_until(lambda: subprocess.run(["pgrep", "-f", pattern], check=False).returncode == 1)


@pytest.mark.slow
def test_a_language_model(tmp_path: Path) -> None:
    """Eight sequences by the file, one by the configuration that takes its place: fewer are slower,
    so the current setting stays."""
    version = tmp_path / "models/tiny/1"
    version.mkdir(parents=True)
    make_checkpoint(version / "checkpoint", "llama", tokenizer=True, max_position_embeddings=512)
    (tmp_path / "models/tiny/config.pbtxt").write_text(
        'backend: "jitney"\ninstance_group [{ kind: KIND_CPU count: 1 }]\n', encoding="utf-8"
    )
    options = {
        "model": "checkpoint", "dtype": "float32", "threads": 1, "kv_cache_bytes": 1 << 22,
        "max_num_seqs": 8, "max_num_batched_tokens": 64, "attention": "reference", "fuse": False,
    }  # fmt: skip
    (version / "model.json").write_text(json.dumps(options), encoding="utf-8")
    done = tune(
        tmp_path / "models", "tiny", "--slo", "ttft-p95=30s,itl-p95=10s", "--max-num-seqs", "1",
        "--token-budgets", "64", "--concurrency", "8", "--requests", "32",
        "--input-tokens", "16", "--output-tokens", "32",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    tuning = read_tuning(tmp_path / "out/tune.json")
    sequences = {}
    for trial in tuning.trials:
        assert trial.result is not None, trial.failure
        engine = trial.result.points[0].engine
        assert engine is not None
        sequences[trial.values["max_num_seqs"]] = engine.mean_batch
    assert sequences[8] > 2, "the option of the file"
    assert sequences[1] == 1, "the option of the configuration in its place"
    assert tuning.choice is not None
    assert tuning.choice.values["max_num_seqs"] == 8
    assert "Nothing better than the current setting" in done.stdout
