"""Tiny ONNX models, built node by node, for the tests of the stand-ins.

write_model(repository, "twice", identity("FLOAT"), config='max_batch_size: 8')
"""

import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

TYPES: dict[str, tuple[str, type]] = {
    # the server's name -> ONNX's name and numpy's type
    "BOOL": ("BOOL", np.bool_),
    "UINT8": ("UINT8", np.uint8),
    "UINT16": ("UINT16", np.uint16),
    "UINT32": ("UINT32", np.uint32),
    "UINT64": ("UINT64", np.uint64),
    "INT8": ("INT8", np.int8),
    "INT16": ("INT16", np.int16),
    "INT32": ("INT32", np.int32),
    "INT64": ("INT64", np.int64),
    "FP16": ("FLOAT16", np.float16),
    "FP32": ("FLOAT", np.float32),
    "FP64": ("DOUBLE", np.float64),
    "BYTES": ("STRING", np.object_),
}

Shape = Sequence[int | str]


def _tensor(name: str, data_type: str, shape: Shape) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, getattr(TensorProto, data_type), shape)


def model(
    nodes: Sequence[onnx.NodeProto],
    inputs: Sequence[onnx.ValueInfoProto],
    outputs: Sequence[onnx.ValueInfoProto],
    **constants: np.ndarray,
) -> onnx.ModelProto:
    """A model of opset 20. A constant that is also an input is the input's default."""
    made = [numpy_helper.from_array(array, name) for name, array in constants.items()]
    graph = helper.make_graph(nodes, "graph", inputs, outputs, initializer=made)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)


def identity(data_type: str = "FLOAT", shape: Shape = ("n", "m")) -> onnx.ModelProto:
    """``y = x``."""
    node = helper.make_node("Identity", ["x"], ["y"])
    return model([node], [_tensor("x", data_type, shape)], [_tensor("y", data_type, shape)])


def every_type() -> onnx.ModelProto:
    """Tensors of all ``TYPES`` go in by their names and come out as ``NAME_OUT``."""
    tensors = [
        [_tensor(name + end, kind, ("n", "m")) for name, (kind, _) in TYPES.items()]
        for end in ("", "_OUT")
    ]
    return model(
        [helper.make_node("Identity", [name], [f"{name}_OUT"]) for name in TYPES], *tensors
    )


def doubled() -> onnx.ModelProto:
    """``y = x + x``, with the tensors of :func:`identity`."""
    tensors = [_tensor(name, "FLOAT", ("n", "m")) for name in "xy"]
    return model([helper.make_node("Add", ["x", "x"], ["y"])], tensors[:1], tensors[1:])


def add_with_default(shape: Shape = ("n", 2)) -> onnx.ModelProto:
    """``y = x + b``; b is 10 and 20 unless it is given."""
    tensors = [_tensor(name, "FLOAT", shape) for name in "xby"]
    default = np.array([[10, 20]], np.float32)
    return model([helper.make_node("Add", ["x", "b"], ["y"])], tensors[:2], tensors[2:], b=default)


def two_inputs() -> onnx.ModelProto:
    """``sum = a + b`` and ``product = a * b``, of vectors of any length."""
    tensors = [_tensor(name, "FLOAT", ("n", "m")) for name in ("a", "b", "sum", "product")]
    nodes = [
        helper.make_node("Add", ["a", "b"], ["sum"]),
        helper.make_node("Mul", ["a", "b"], ["product"]),
    ]
    return model(nodes, tensors[:2], tensors[2:])


def labelled() -> onnx.ModelProto:
    """``y = x`` and ``text_out = text``."""
    return model(
        [
            helper.make_node("Identity", ["x"], ["y"]),
            helper.make_node("Identity", ["text"], ["text_out"]),
        ],
        [_tensor("x", "FLOAT", ("n", "m")), _tensor("text", "STRING", ("n", "m"))],
        [_tensor("y", "FLOAT", ("n", "m")), _tensor("text_out", "STRING", ("n", "m"))],
    )


def lookup() -> onnx.ModelProto:
    """``y`` is row ``index`` of a table of 4 rows: an index of 4 fails at run time."""
    return model(
        [helper.make_node("Gather", ["table", "index"], ["y"])],
        [_tensor("index", "INT64", ("n", 1))],
        [_tensor("y", "FLOAT", ("n", 1, 3))],
        table=np.arange(12, dtype=np.float32).reshape(4, 3),
    )


def row_sums() -> onnx.ModelProto:
    """``y`` has no dimension but the batch."""
    return model(
        [helper.make_node("ReduceSum", ["x", "axes"], ["y"], keepdims=0)],
        [_tensor("x", "FLOAT", ("n", 3))],
        [_tensor("y", "FLOAT", ("n",))],
        axes=np.array([1], np.int64),
    )


def flattened() -> onnx.ModelProto:
    """``y`` claims a batch in its first dimension, but mixes the rows: it is twice as long."""
    return model(
        [helper.make_node("Reshape", ["x", "shape"], ["y"])],
        [_tensor("x", "FLOAT", ("n", 2))],
        [_tensor("y", "FLOAT", ("k",))],
        shape=np.array([-1], np.int64),
    )


def slow(width: int = 512, layers: int = 16) -> onnx.ModelProto:
    """Enough products to take milliseconds; ``y = x`` times a power of the identity."""
    names = ["x", *(f"h{i}" for i in range(layers - 1)), "y"]
    nodes = [
        helper.make_node("MatMul", [source, "w"], [target])
        for source, target in itertools.pairwise(names)
    ]
    tensors = [_tensor(name, "FLOAT", ("n", 64, width)) for name in "xy"]
    return model(nodes, tensors[:1], tensors[1:], w=np.eye(width, dtype=np.float32))


def recurrent_count() -> onnx.ModelProto:
    """``y = x + start``: what a model under the sequence batcher sees of its controls."""
    tensors = [_tensor(name, "FLOAT", ("n", 1)) for name in ("x", "start", "y")]
    return model([helper.make_node("Add", ["x", "start"], ["y"])], tensors[:2], tensors[2:])


def unknown_operator() -> onnx.ModelProto:
    """An operator that no ONNX Runtime has."""
    tensors = [_tensor(name, "FLOAT", ("n", 1)) for name in "xy"]
    return model([helper.make_node("Teleport", ["x"], ["y"])], tensors[:1], tensors[1:])


def write_model(
    repository: Path,
    name: str,
    made: onnx.ModelProto | bytes | None,
    config: str | None = None,
    filename: str = "model.onnx",
) -> Path:
    """A model folder; without ``config`` it has no config.pbtxt at all. Returns the file's path."""
    path = (repository / name / "1" / filename).resolve()
    path.parent.mkdir(parents=True, exist_ok=True)
    if made is not None:
        path.write_bytes(made if isinstance(made, bytes) else made.SerializeToString())
    if config is not None:
        (repository / name / "config.pbtxt").write_text(config, encoding="utf-8")
    return path


# ---------------------------------------------------------------- pieces of config.pbtxt

ONE = "instance_group [{ kind: KIND_CPU count: 1 }]\n"


def parameter(name: str, value: str) -> str:
    return f'parameters {{ key: "{name}" value {{ string_value: "{value}" }} }}\n'


def io(kind: str, name: str, data_type: str, dims: str) -> str:
    return f'{kind} [{{ name: "{name}" data_type: {data_type} dims: {dims} }}]\n'
