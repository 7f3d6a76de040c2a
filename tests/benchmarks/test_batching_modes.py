"""The batching benchmark on the real server, for half a minute, with a tiny model."""

import asyncio

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from benchmarks.batching.load import Reply
from benchmarks.batching.one_call import STATIC, Results, measure
from benchmarks.batching.plan import Plan
from benchmarks.batching.subjects import Subject, make
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
def test_the_server_batched_as_the_mode_says(results: Results) -> None:
    runs = {(run.mode.split()[0], run.load, run.level): run for run in results.runs}
    assert set(runs["none", "concurrency", 16].batches) == {1}
    full = runs["static", "concurrency", 16].batches
    assert max(full) == STATIC
    assert full[STATIC] >= sum(full.values()) - 1, "but for the flush at the end"
    assert runs["static", "concurrency", 1].stalled
    assert runs["dynamic", "concurrency", 16].mean_batch > 1  # type: ignore[operator]
    without, window = sorted(results.grid, key=lambda cell: cell.window_us)
    assert (without.window_us, window.window_us) == (0, 20_000)
    assert max(window.summary.batches) <= 4
    assert window.summary.mean_batch > 1.5, "a window is waited for"  # type: ignore[operator]


def test_a_wrong_answer_is_noticed(subject: Subject) -> None:
    async def scene() -> None:
        async with Connection("127.0.0.1:1") as connection:
            target = ServerTarget(connection, "toy", subject)
            right = subject.expected[3].tobytes()
            target.check([Reply(3, right), Reply(11, right)])  # 11 is row 3 once more
            with pytest.raises(RuntimeError, match="request 4"):
                target.check([Reply(4, right)])

    asyncio.run(scene())
