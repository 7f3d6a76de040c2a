"""The batching benchmark on the real server, for half a minute, with a tiny model."""

import asyncio
import xml.etree.ElementTree as xml
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from benchmarks.batching.drawing import draw
from benchmarks.batching.language import make_chat
from benchmarks.batching.load import Reply
from benchmarks.batching.one_call import STATIC, Results, measure, read_results
from benchmarks.batching.plan import Plan
from benchmarks.batching.subjects import Subject, make
from benchmarks.batching.tables import tables
from benchmarks.batching.targets import Connection, ServerTarget

FEATURES = 32
PLAN = Plan(
    seconds=0.3,
    rates=(0.4, 3.0),
    concurrencies=(1, 16),
    sizes=(4,),
    windows_us=(0, 20_000),
    grid_rates=(0.5,),
    grid_seconds=0.3,
    mix_seconds=0.3,
    language_seconds=0.0,
    language_rates=(),
    language_concurrencies=(),
)


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory) -> Subject:
    """One matrix product."""
    folder = tmp_path_factory.mktemp("built") / "toy"
    (folder / "1").mkdir(parents=True)
    random = np.random.default_rng(1)
    weights = random.standard_normal((FEATURES, 4)).astype(np.float32)
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        "toy",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", FEATURES])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 4])],
        [onnx.numpy_helper.from_array(weights, "w")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    onnx.save(model, folder / "1" / "model.onnx")
    (folder / "config.pbtxt").write_text(
        'name: "toy" backend: "onnxruntime" max_batch_size: 32 '
        f'input [{{ name: "x" data_type: TYPE_FP32 dims: [{FEATURES}] }}] '
        'output [{ name: "y" data_type: TYPE_FP32 dims: [4] }]',
        encoding="utf-8",
    )
    rows = {"x": random.standard_normal((8, FEATURES)).astype(np.float32)}
    return make("toy", folder, rows, "y", tolerance=1e-4)


@pytest.fixture(scope="module")
def results(subject: Subject) -> Results:
    return measure(subject, PLAN, threads=1, naive=False)


@pytest.mark.slow
@pytest.mark.server
def test_every_mode_met_every_load(results: Results) -> None:
    modes = list(dict.fromkeys(run.mode for run in results.runs))
    assert [mode.split()[0] for mode in modes] == ["none", "static", "dynamic", "dynamic"]
    closed = {(run.mode, run.level) for run in results.runs if run.load == "concurrency"}
    assert closed == {(mode, level) for mode in modes for level in PLAN.concurrencies}
    first = [run for run in results.runs if run.level == PLAN.rates[0] * results.capacity]
    assert [run.mode for run in first] == modes
    assert len({run.requests for run in first}) == 1, "the same arrivals for all"


@pytest.mark.slow
@pytest.mark.server
def test_the_server_batched_as_the_mode_says(results: Results) -> None:
    runs = {(run.mode.split()[0], run.load, run.level): run for run in results.runs}
    assert set(runs["none", "concurrency", 16].batches) == {1}
    full = runs["static", "concurrency", 16].batches
    assert max(full) == STATIC
    assert full[STATIC] >= sum(full.values()) - 1, "but for the flush at the end"
    assert runs["static", "concurrency", 1].stalled
    assert runs["dynamic", "concurrency", 16].mean_batch > 1  # type: ignore[operator]
    without, window = sorted(results.grid, key=lambda cell: cell.window_us)
    assert max(window.summary.batches) <= 4
    assert window.summary.mean_batch > without.summary.mean_batch  # type: ignore[operator]
    assert window.summary.p50_ms > without.summary.p50_ms, "a window is waited for"


@pytest.mark.slow
@pytest.mark.server
def test_tables_and_pictures(results: Results, tmp_path: Path) -> None:
    text = tables(read_results(results.as_json()))
    for phrase in ("| none |", f"| static {STATIC} |", "stalls", "| own tier |", "of a core"):
        assert phrase in text
    files = draw(results, tmp_path)
    assert len(files) == 3
    for file in files:
        assert xml.parse(file).getroot().tag.endswith("svg")
    written = {file.name: file.read_bytes() for file in files}
    assert {file.name: file.read_bytes() for file in draw(results, tmp_path)} == written, "same"


def test_a_wrong_answer_is_noticed(subject: Subject) -> None:
    async def scene() -> None:
        async with Connection("127.0.0.1:1") as connection:
            target = ServerTarget(connection, "toy", subject)
            right = subject.expected[3].tobytes()
            target.check([Reply(3, right), Reply(11, right)])  # 11 is row 3 once more
            with pytest.raises(RuntimeError, match="request 4"):
                target.check([Reply(4, right)])

    asyncio.run(scene())


def test_the_language_models_requests_vary_and_repeat() -> None:
    chat = make_chat(1000, count=50)
    assert len({len(prompt) for prompt in chat.prompts}) > 10
    assert len(set(chat.lengths)) > 10
    assert (chat.prompt(50) == chat.prompt(0)).all()
    again = make_chat(1000, count=50)
    assert again.lengths == chat.lengths
    assert all((a == b).all() for a, b in zip(again.prompts, chat.prompts, strict=True))
