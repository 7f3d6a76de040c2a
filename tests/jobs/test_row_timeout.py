"""A row that takes longer than ``row_timeout`` in a model is bad, whatever it holds up, and the
other rows of its batch are good."""

import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
from jitney.errors import CheckpointError
from jitney.llm import LLM
from jitney.sampling_params import SamplingParams
from jitney_jobs import executors, onnx_executor
from jitney_jobs.generate import JobPrompt
from jitney_jobs.onnx_session import ModelCallEnded, SessionApart
from jitney_server.standins.signature import Signature, TensorInfo

from tests.jobs.job_rows import bad, job_of, read, run, write_lines
from tests.tiny_models import make_checkpoint


def write_loop(path: Path) -> Path:
    """A model that counts up to the largest number of its batch, one by one, and answers with the
    numbers."""
    make = onnx.helper
    numbers = make.make_tensor_value_info("numbers", onnx.TensorProto.FLOAT, ["batch", 1])
    same = make.make_tensor_value_info("same", onnx.TensorProto.FLOAT, ["batch", 1])
    scalar = [
        make.make_tensor_value_info(n, t, [])
        for n, t in (
            ("i", onnx.TensorProto.INT64),
            ("go", onnx.TensorProto.BOOL),
            ("n", onnx.TensorProto.INT64),
        )
    ]
    out = [
        make.make_tensor_value_info("go_on", onnx.TensorProto.BOOL, []),
        make.make_tensor_value_info("next", onnx.TensorProto.INT64, []),
    ]
    one = make.make_tensor("one", onnx.TensorProto.INT64, [], [1])
    body = make.make_graph(
        [
            make.make_node("Identity", ["go"], ["go_on"]),
            make.make_node("Add", ["n", "one"], ["next"]),
        ],
        "body",
        scalar,
        out,
        [one],
    )
    nodes = [
        make.make_node("ReduceMax", ["numbers"], ["largest"], keepdims=0),
        make.make_node("Cast", ["largest"], ["count"], to=onnx.TensorProto.INT64),
        make.make_node("Loop", ["count", "yes", "zero"], ["counted"], body=body),
        make.make_node("Cast", ["counted"], ["as_float"], to=onnx.TensorProto.FLOAT),
        make.make_node("Mul", ["as_float", "none"], ["nothing"]),
        make.make_node("Add", ["numbers", "nothing"], ["same"]),
    ]
    constants = [
        make.make_tensor("yes", onnx.TensorProto.BOOL, [], [True]),
        make.make_tensor("zero", onnx.TensorProto.INT64, [], [0]),
        make.make_tensor("none", onnx.TensorProto.FLOAT, [], [0.0]),
    ]
    graph = make.make_graph(nodes, "count", [numbers], [same], constants)
    model = make.make_model(graph, opset_imports=[make.make_opsetid("", 17)], ir_version=8)
    onnx.save(model, path)
    return path


def test_rows_that_never_end_in_a_model_are_bad(tmp_path: Path) -> None:
    """Rows 50 and 51 are in one batch, with others."""
    model = write_loop(tmp_path / "model.onnx")
    numbers = [[1e15] if i in (50, 51) else [float(i)] for i in range(100)]
    source = write_lines(tmp_path / "in.jsonl", [{"text": each} for each in numbers])
    settings = {"task": "score", "map": None, "model": str(model), "batch_size": 16}
    assert run(source, tmp_path / "out", row_timeout=1, **settings, ordered=True)
    assert [each["row"] for each in bad(tmp_path / "out")] == [50, 51]
    assert "row_timeout (1 s) in the model" in bad(tmp_path / "out")[0]["error"]
    expected = [float(i) for i in range(100) if i not in (50, 51)]
    assert [row["score"] for row in read(tmp_path / "out")] == expected


class Slow:
    """A model that takes a sixth of the time of a row for each."""

    def __init__(self) -> None:
        numbers = TensorInfo("numbers", "TYPE_FP32", (-1, 1), ("batch", None))
        self.signature = Signature((numbers,), (numbers._replace(name="same"),))
        self.calls: list[int] = []

    def run(self, blocks: Any, output: str, patience: float = 1.0) -> list[Any]:
        row_count = sum(len(block["numbers"]) for block in blocks)
        self.calls.append(row_count)
        if row_count / 6 > patience:
            raise ModelCallEnded("late")
        return [{"same": block["numbers"]} for block in blocks]

    def close(self) -> None: ...


def test_a_batch_may_take_longer_than_a_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each row is in time; together they are not, until batches get more time."""
    session = Slow()
    monkeypatch.setattr(onnx_executor, "_session_of", lambda job: session)
    executor = onnx_executor.OnnxExecutor(job_of("in", "out", batch_size=8))
    for key in range(24):
        executor.submit(key, {"numbers": np.full((1, 1), key, np.float32)})
    ended: dict[int, Any] = {}
    while len(ended) < 24:
        ended |= dict(executor.step())
    executor.close()
    assert all(not result.errors for result in ended.values())
    assert session.calls == [8, *[1] * 8, 8, 8]


def test_a_process_that_dies_of_a_row(tmp_path: Path) -> None:
    session = SessionApart(write_loop(tmp_path / "model.onnx"), may_spin=False, timeout_s=30)
    os.kill(session._process.pid, signal.SIGKILL)
    block = {"numbers": np.ones((2, 1), np.float32)}
    with pytest.raises(ModelCallEnded, match="died"):
        session.run([block], "same")
    (answer,) = session.run([block], "same")  # another process
    assert answer["same"].tolist() == [[1.0], [1.0]]  # type: ignore[index]
    session.close()
    (tmp_path / "bad.onnx").write_bytes(b"no model")
    with pytest.raises(CheckpointError):
        SessionApart(tmp_path / "bad.onnx", may_spin=False, timeout_s=30)


def test_a_long_prompt_is_bad_and_one_that_waits_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A clock that goes by a second a step: the first prompt takes 15 steps, while the second one
    waits."""
    seconds = iter(range(1_000_000))
    clock = SimpleNamespace(monotonic=lambda: float(next(seconds)))
    monkeypatch.setattr(executors, "time", clock)
    options = {"dtype": "float32", "device": "cpu", "attention": "reference", "threads": 1}
    small = {"max_model_len": 256, "max_num_seqs": 1, "max_num_batched_tokens": 16}
    with LLM(make_checkpoint(tmp_path / "llama", tokenizer=True), **options, **small) as llm:
        executor = executors.EngineExecutor(llm, row_timeout_s=8)
        params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
        executor.submit(0, JobPrompt([10 + i for i in range(240)], params))
        executor.submit(1, JobPrompt([7] * 20, params))
        ended: dict[int, Any] = {}
        while len(ended) < 2:
            ended |= dict(executor.step())
    assert "row_timeout (8 s) to prefill" in str(ended[0])
    assert len(ended[1].ids) == 1
