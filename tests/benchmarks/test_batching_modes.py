"""The batching benchmark on the real server, for half a minute, with a tiny model."""

import numpy as np
import onnx
import pytest
from jitney_measure.record import Load
from onnx import TensorProto, helper

from benchmarks.batching.one_call import STATIC, WINDOW_US, Groups, dynamic_name, measure
from benchmarks.batching.plan import Plan
from benchmarks.batching.subjects import Subject, make

FEATURES = 32
PLAN = Plan(
    seconds=1.0,
    rates=(0.4,),
    users=(1, 16),
    sizes=(4,),
    windows_us=(20_000,),
    grid_rates=(0.5,),
    grid_seconds=1.0,
    mix_seconds=1.0,
    language_seconds=0.0,
    language_rates=(),
    language_users=(),
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
def groups(subject: Subject) -> Groups:
    return measure(subject, PLAN, threads=1, naive=False)


@pytest.mark.slow
@pytest.mark.server
def test_the_server_batched_as_the_mode_says(groups: Groups) -> None:
    users = Load("concurrency", 16)
    batches = {}
    for name, result in groups["modes"].items():
        batches[name] = {point.load: point.stages[0].mean_batch for point in result.points}
    assert batches["none"][users] == 1
    assert batches[f"static {STATIC}"][users] == STATIC
    assert Load("concurrency", 1) not in batches[f"static {STATIC}"], "it would wait for ever"
    assert batches[dynamic_name(STATIC, WINDOW_US)][users] > 1
    window = groups["grid"][dynamic_name(4, 20_000)].points[0].stages[0].mean_batch
    assert window is not None
    assert 1.5 < window <= 4, "a window is waited for"
    assert [*groups["mixes"]] == ["shared", "priority", "own copy"]


def test_a_wrong_answer_is_noticed(subject: Subject) -> None:
    subject.check(3, subject.expected[3])
    subject.check(11, subject.expected[3])  # row 3 once more
    with pytest.raises(RuntimeError, match="request 4"):
        subject.check(4, subject.expected[3])
