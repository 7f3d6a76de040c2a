"""What the fixtures put into a model repository: recorders, accumulators and small ONNX models.

A configuration is text as a user would write it; ``extra`` holds the lines of the feature under
test.
"""

import shutil
from collections.abc import Iterable
from pathlib import Path

import onnx
from onnx import TensorProto, helper

HERE = Path(__file__).parent

RECORDER_TENSORS = """
input [
  { name: "VALUE" data_type: TYPE_INT32 dims: [ 1 ] },
  { name: "GATE" data_type: TYPE_INT32 dims: [ 1 ] }
]
output [
  { name: "VALUE_OUT" data_type: TYPE_INT32 dims: [ 1 ] },
  { name: "ROWS" data_type: TYPE_INT32 dims: [ 1 ] },
  { name: "VERSION" data_type: TYPE_INT32 dims: [ 1 ] }
]
"""

ACCUMULATOR_TENSORS = """
input [ { name: "VALUE" data_type: TYPE_INT32 dims: [ 1 ] } ]
output [
  { name: "SUM" data_type: TYPE_INT32 dims: [ 1 ] },
  { name: "ROWS" data_type: TYPE_INT32 dims: [ 1 ] }
]
"""

CONTROLS = """
  control_input [
    { name: "START" control [ { kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] } ] },
    { name: "END" control [ { kind: CONTROL_SEQUENCE_END int32_false_true: [ 0, 1 ] } ] },
    { name: "READY" control [ { kind: CONTROL_SEQUENCE_READY int32_false_true: [ 0, 1 ] } ] },
    { name: "CORRID" control [ { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_UINT64 } ] }
  ]
"""

ONE_INSTANCE = "instance_group [ { kind: KIND_CPU count: 1 } ]"


def write_recorder(
    repository: Path,
    name: str,
    extra: str = "",
    *,
    max_batch_size: int = 1,
    versions: Iterable[int] = (1,),
) -> Path:
    """A model of :mod:`recorder` with its log in ``<repository>.logs/<name>``; returns its folder.

    One instance unless ``extra`` has an ``instance_group``.
    """
    model = repository / name
    for version in versions:
        (model / str(version)).mkdir(parents=True)
        shutil.copy(HERE / "recorder.py", model / str(version) / "model.py")
    log_folder(repository, name).mkdir(parents=True, exist_ok=True)
    text = recorder_config(repository, name, extra, max_batch_size=max_batch_size)
    (model / "config.pbtxt").write_text(text, encoding="utf-8")
    return model


def recorder_config(
    repository: Path, name: str, extra: str = "", *, max_batch_size: int = 1, tag: str = ""
) -> str:
    """The ``config.pbtxt`` of a recorder; ``tag`` is written into its log."""
    instances = "" if "instance_group" in extra else ONE_INSTANCE
    folder = log_folder(repository, name)
    return f"""
backend: "python"
max_batch_size: {max_batch_size}
{RECORDER_TENSORS}
{instances}
parameters {{ key: "folder" value {{ string_value: "{folder}" }} }}
parameters {{ key: "tag" value {{ string_value: "{tag}" }} }}
{extra}
"""


def log_folder(repository: Path, name: str) -> Path:
    """Where the recorder ``name`` keeps its log and looks for its gates."""
    return repository.with_name(repository.name + ".logs") / name


def write_accumulator(
    repository: Path, name: str, strategy: str, *, max_batch_size: int, idle_s: float = 60.0
) -> None:
    """A model of :mod:`accumulator`; ``strategy`` is ``direct { … }`` or ``oldest { … }``."""
    version = repository / name / "1"
    version.mkdir(parents=True)
    shutil.copy(HERE / "accumulator.py", version / "model.py")
    text = f"""
backend: "python"
max_batch_size: {max_batch_size}
{ACCUMULATOR_TENSORS}
{ONE_INSTANCE}
sequence_batching {{
  max_sequence_idle_microseconds: {round(idle_s * 1e6)}
  {strategy}
  {CONTROLS}
}}
"""
    (repository / name / "config.pbtxt").write_text(text, encoding="utf-8")


def write_onnx(
    repository: Path, name: str, model: onnx.ModelProto, extra: str = "", *, max_batch_size: int = 8
) -> Path:
    """An ONNX model for the backend ``onnxruntime``; returns its folder. One instance unless
    ``extra`` has an ``instance_group``."""
    onnx.checker.check_model(model, full_check=True)
    version = repository / name / "1"
    version.mkdir(parents=True)
    onnx.save(model, version / "model.onnx")
    instances = "" if "instance_group" in extra else ONE_INSTANCE
    text = f"""
backend: "onnxruntime"
max_batch_size: {max_batch_size}
input [ {{ name: "X" data_type: TYPE_FP32 dims: [ -1 ] }} ]
output [ {{ name: "Y" data_type: TYPE_FP32 dims: [ -1 ] }} ]
parameters {{ key: "intra_op_thread_count" value {{ string_value: "1" }} }}
{instances}
{extra}
"""
    (repository / name / "config.pbtxt").write_text(text, encoding="utf-8")
    return repository / name


def times(factor: float) -> onnx.ModelProto:
    """X [batch, n] -> Y = factor * X, in FP32."""
    nodes = [helper.make_node("Mul", ["X", "factor"], ["Y"])]
    constants = [helper.make_tensor("factor", TensorProto.FLOAT, [], [factor])]
    return _model("times", nodes, constants)


def times_rows() -> onnx.ModelProto:
    """X [batch, n] -> Y = batch * X: an answer tells how many rows were computed together."""
    nodes = [
        helper.make_node("Shape", ["X"], ["rows"], start=0, end=1),
        helper.make_node("Cast", ["rows"], ["factor"], to=TensorProto.FLOAT),
        helper.make_node("Mul", ["X", "factor"], ["Y"]),
    ]
    return _model("times_rows", nodes, [])


def laborious() -> onnx.ModelProto:
    """X [batch, 1] -> Y = X, after the first row's X rounds of a small matrix product: a request
    takes as long as its value says."""
    body = helper.make_graph(
        [
            helper.make_node("Identity", ["go_on_in"], ["go_on_out"]),
            helper.make_node("MatMul", ["state_in", "state_in"], ["product"]),
            helper.make_node("Clip", ["product", "low", "high"], ["state_out"]),
        ],
        "round",
        [
            helper.make_tensor_value_info("round_number", TensorProto.INT64, []),
            helper.make_tensor_value_info("go_on_in", TensorProto.BOOL, []),
            helper.make_tensor_value_info("state_in", TensorProto.FLOAT, [64, 64]),
        ],
        [
            helper.make_tensor_value_info("go_on_out", TensorProto.BOOL, []),
            helper.make_tensor_value_info("state_out", TensorProto.FLOAT, [64, 64]),
        ],
    )
    nodes = [
        helper.make_node("Slice", ["X", "first", "second"], ["row"]),
        helper.make_node("Reshape", ["row", "scalar"], ["rounds"]),
        helper.make_node("Cast", ["rounds"], ["count"], to=TensorProto.INT64),
        helper.make_node("Loop", ["count", "", "state"], ["after"], body=body),
        helper.make_node("ReduceSum", ["after"], ["sum"], keepdims=0),
        helper.make_node("Mul", ["sum", "zero"], ["nothing"]),
        helper.make_node("Add", ["X", "nothing"], ["Y"]),
    ]
    constants = [
        helper.make_tensor("first", TensorProto.INT64, [1], [0]),
        helper.make_tensor("second", TensorProto.INT64, [1], [1]),
        helper.make_tensor("scalar", TensorProto.INT64, [0], []),
        helper.make_tensor("state", TensorProto.FLOAT, [64, 64], [0.01] * 64 * 64),
        helper.make_tensor("low", TensorProto.FLOAT, [], [0.0]),
        helper.make_tensor("high", TensorProto.FLOAT, [], [1.0]),
        helper.make_tensor("zero", TensorProto.FLOAT, [], [0.0]),
    ]
    return _model("laborious", nodes, constants)


def _model(
    name: str, nodes: list[onnx.NodeProto], constants: list[onnx.TensorProto]
) -> onnx.ModelProto:
    """X and Y are FP32 [batch, n]."""
    graph = helper.make_graph(
        nodes,
        name,
        [helper.make_tensor_value_info("X", TensorProto.FLOAT, ["batch", "n"])],
        [helper.make_tensor_value_info("Y", TensorProto.FLOAT, ["batch", "n"])],
        constants,
    )
    return helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10, producer_name="tests"
    )
