"""Completing, checking and reading a configuration, without a server or ONNX Runtime."""

import re
from typing import Any

import pytest
from jitney.errors import ConfigError
from jitney_server.standins import onnx_options as options
from jitney_server.standins.signature import (
    Signature,
    TensorInfo,
    check_config,
    complete_config,
)

X = TensorInfo("x", "TYPE_FP32", (-1, 3))
Y = TensorInfo("y", "TYPE_INT64", (-1,))
BATCHES = Signature((X,), (Y,))
FIXED = Signature((X._replace(dims=(2, 3)),), (Y,))


def completed(signature: Signature = BATCHES, **config: Any) -> dict[str, Any]:
    complete_config(config, signature, 4)
    check_config(config, signature)
    return config


def test_an_empty_configuration() -> None:
    made = completed(max_batch_size=0, input=[], output=[])
    assert made == {
        "max_batch_size": 4,
        "dynamic_batching": {},
        "input": [{"name": "x", "data_type": "TYPE_FP32", "dims": [3]}],
        "output": [{"name": "y", "data_type": "TYPE_INT64", "dims": [1], "reshape": {"shape": []}}],
    }


def test_a_model_that_cannot_batch() -> None:
    made = completed(FIXED, max_batch_size=0)
    assert made["max_batch_size"] == 0
    assert "dynamic_batching" not in made
    assert made["input"][0]["dims"] == [2, 3]


@pytest.mark.parametrize("scheduler", ["dynamic_batching", "sequence_batching"])
def test_a_scheduler_is_kept(scheduler: str) -> None:
    made = completed(max_batch_size=8, **{scheduler: {"kept": 1}})
    assert made["max_batch_size"] == 8
    assert {name for name in made if name.endswith("batching")} == {scheduler}
    assert made[scheduler] == {"kept": 1}


def test_controls_of_the_sequence_batcher_are_no_inputs_of_the_client() -> None:
    batching = {"control_input": [{"name": "start"}]}
    both = Signature((X, X._replace(name="start", dims=(-1, 1))), (Y,))
    made = completed(both, max_batch_size=2, sequence_batching=batching)
    assert [entry["name"] for entry in made["input"]] == ["x"]
    batching["control_input"][0]["name"] = "strat"
    with pytest.raises(ConfigError, match=r"no input 'strat' \(did you mean 'start'\?\)"):
        completed(both, max_batch_size=2, sequence_batching=batching)


def control(**values: Any) -> dict[str, Any]:
    """As the server's JSON has it, with every kind of value."""
    every = {"int32_false_true": [], "fp32_false_true": [], "bool_false_true": []}
    return {"kind": "CONTROL_SEQUENCE_START", "data_type": "TYPE_INVALID", **every, **values}


@pytest.mark.parametrize(
    ("dims", "given", "text"),
    [
        ((-1, 1), control(fp32_false_true=[0, 1]), ""),
        ((-1, 1), {"kind": "CONTROL_SEQUENCE_CORRID", "data_type": "TYPE_FP32"}, ""),
        ((-1, 1), control(int32_false_true=[0, 1]), "configuration has TYPE_INT32, but the model"),
        (
            (-1, 1),
            {"kind": "CONTROL_SEQUENCE_CORRID", "data_type": "TYPE_UINT64"},
            "'start': the configuration has TYPE_UINT64, but the model has TYPE_FP32",
        ),
        ((-1,), control(fp32_false_true=[0, 1]), "the model has [-1], but a control is [-1, 1]"),
    ],
)
def test_controls_fit_the_model(dims: tuple[int, ...], given: dict[str, Any], text: str) -> None:
    """As the native backend demands; a wrong one would fail every request."""
    both = Signature((X, X._replace(name="start", dims=dims)), (Y,))
    batching = {"control_input": [{"name": "start", "control": [given]}]}
    if not text:
        completed(both, max_batch_size=2, sequence_batching=batching)
        return
    with pytest.raises(ConfigError, match=re.escape(text)):
        completed(both, max_batch_size=2, sequence_batching=batching)


def entry(name: str, **changes: Any) -> dict[str, Any]:
    known = {"x": ("TYPE_FP32", [3]), "y": ("TYPE_INT64", [])}
    data_type, dims = known.get(name, ("TYPE_FP32", [1]))
    return {"name": name, "data_type": data_type, "dims": dims, **changes}


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"input": [entry("x", dims=[3, 1])]}, "'x': the configuration has dims [3, 1], but the"),
        ({"input": [entry("x", dims=[-1])]}, "dims [-1], but the model has [-1, 3]"),
        ({"input": [entry("x", data_type="TYPE_FP16")]}, "'x': the configuration has data_type"),
        ({"input": [entry("z")]}, "the model has no input 'z'"),
        ({"input": [entry("x", optional=True)]}, "'x' is optional in the configuration, but"),
        ({"input": [entry("x", allow_ragged_batch=True)]}, "allow_ragged_batch"),
        ({"input": [entry("x"), entry("b")]}, "'b' has a default in the model"),
        ({"output": [entry("q")]}, "the model has no output 'q'"),
        ({"batch_input": [{}], "input": [entry("x")]}, "batch_input is not supported"),
        ({"sequence_batching": {"state": [{}]}}, "sequence_batching.state is not supported"),
    ],
)
def test_what_contradicts_the_model_is_refused(changes: dict[str, Any], text: str) -> None:
    signature = Signature((X,), (Y,), (TensorInfo("b", "TYPE_FP32", (-1, 1)),))
    with pytest.raises(ConfigError, match=re.escape(text)):
        completed(signature, **{"max_batch_size": 4, **changes})


def test_a_missing_input_is_named() -> None:
    two = Signature((X, X._replace(name="z")), (Y,))
    with pytest.raises(ConfigError, match="the model's input 'z' is missing"):
        completed(two, max_batch_size=4, input=[entry("x")])


def test_fixed_dimensions_and_batching() -> None:
    with pytest.raises(ConfigError, match=r"cannot batch: .* tensor 'x' \[2, 3\] is fixed"):
        completed(FIXED, max_batch_size=4)


# ---------------------------------------------------------------- options


def parameters(**values: str) -> dict[str, Any]:
    return {"parameters": {n.replace("__", "."): {"string_value": v} for n, v in values.items()}}


def accelerator(device: str, name: str, **given: str) -> dict[str, Any]:
    entry = {"name": name, "parameters": given}
    return {
        "optimization": {"execution_accelerators": {f"{device}_execution_accelerator": [entry]}}
    }


def test_parameters() -> None:
    made = options.read_options(
        parameters(
            intra_op_thread_count="3",
            inter_op_thread_count="2",
            execution_mode="1",
            enable_mem_arena="0",
            enable_mem_pattern="true",
            memory__enable_memory_arena_shrinkage="cpu:0",
            session__intra_op__allow_spinning="1",
        ),
        None,
    )
    assert (made.intra_op_threads, made.inter_op_threads, made.parallel) == (3, 2, True)
    assert (made.mem_arena, made.mem_pattern) == (False, True)
    assert made.run_entries == {"memory.enable_memory_arena_shrinkage": "cpu:0"}
    assert made.session_entries == {"session.intra_op.allow_spinning": "1"}


@pytest.mark.parametrize(("level", "name"), [(-1, "basic"), ("1", "extended"), (2, "none")])
def test_graph_levels(level: object, name: str) -> None:
    config = {"optimization": {"graph": {"level": level}}}
    assert options.read_options(config, None).graph_level == name


def test_tensorrt_comes_before_cuda() -> None:
    config = accelerator(
        "gpu",
        "tensorrt",
        precision_mode="FP16",
        max_workspace_size_bytes="1048576",
        trt_engine_cache_enable="true",
        trt_engine_cache_path="/cache",
    )
    assert options.read_options(config, 1).providers == (
        (
            options.TENSORRT,
            {
                "trt_fp16_enable": "1",
                "trt_max_workspace_size": "1048576",
                "trt_engine_cache_enable": "1",
                "trt_engine_cache_path": "/cache",
                "device_id": "1",
            },
        ),
        (options.CUDA, {"device_id": "1"}),
    )
    on_cpu = options.read_options(config, None)
    assert on_cpu.providers == ()
    assert "tensorrt is for instances on a GPU" in on_cpu.notes[0]


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (parameters(intra_op_thread_count="-1"), "intra_op_thread_count is -1, but must be 0"),
        (parameters(inter_op_thread_count="50000"), "is 50000, but must be 0 (ONNX Runtime's"),
        (parameters(execution_mode="2"), "execution_mode is '2', but must be one of 0, 1"),
        (parameters(enable_mem_arena="maybe"), "enable_mem_arena is 'maybe'"),
        (parameters(cudnn_conv_algo_search="9"), "cudnn_conv_algo_search is '9'"),
        (accelerator("gpu", "tensorrt", precision_mode="FP1"), "tensorrt precision_mode is 'FP1'"),
        (accelerator("gpu", "tensorrt", trt_dla_coer="1"), "(did you mean 'trt_dla_core'?)"),
        (accelerator("gpu", "rocm"), "gpu_execution_accelerator is 'rocm'"),
        (accelerator("cpu", "mkl"), "cpu_execution_accelerator is 'mkl', but must be openvino"),
    ],
)
def test_wrong_values_are_named(config: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(text)):
        options.read_options(config, 0)
