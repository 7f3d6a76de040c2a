"""The keys of ``config.pbtxt`` that the native ONNX Runtime backend knows, as session options.

Reads the server's JSON form of the configuration; imports nothing of ONNX Runtime. A wrong value is
a ConfigError. Two things become notes, which the model writes to the server's log: keys that the
native backend ignores silently, and keys that only it can honour. ``docs/standins.md`` has the
table.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from jitney.errors import ConfigError, nearest

from jitney_server.standins.signature import Config

GraphLevel = Literal["all", "extended", "basic", "none"]
GRAPH_LEVELS: dict[int, GraphLevel] = {0: "all", 1: "extended", -1: "basic", 2: "none"}
"""``optimization.graph.level`` in the native backend's reading."""

CUDA = "CUDAExecutionProvider"
TENSORRT = "TensorrtExecutionProvider"
OPENVINO = "OpenVINOExecutionProvider"
CPU = "CPUExecutionProvider"

_TENSORRT_BOOLS = (
    "trt_dla_enable",
    "trt_engine_cache_enable",
    "trt_dump_subgraphs",
    "trt_force_sequential_engine_build",
    "trt_context_memory_sharing_enable",
    "trt_layer_norm_fp32_fallback",
    "trt_timing_cache_enable",
    "trt_force_timing_cache",
    "trt_detailed_build_log",
    "trt_build_heuristics_enable",
    "trt_sparsity_enable",
    "trt_cuda_graph_enable",
    "trt_dump_ep_context_model",
    "int8_use_native_calibration_table",
)
_TENSORRT_INTS = (
    "trt_max_partition_iterations",
    "trt_min_subgraph_size",
    "trt_dla_core",
    "trt_builder_optimization_level",
    "trt_auxiliary_streams",
    "trt_ep_context_embed_mode",
    "max_workspace_size_bytes",
)
_TENSORRT_TEXTS = (
    "trt_engine_cache_path",
    "trt_engine_cache_prefix",
    "trt_timing_cache_path",
    "trt_tactic_sources",
    "trt_extra_plugin_lib_paths",
    "trt_ep_context_file_path",
    "trt_profile_min_shapes",
    "trt_profile_max_shapes",
    "trt_profile_opt_shapes",
    "int8_calibration_table_name",
)
_TENSORRT_RENAMED = {
    "max_workspace_size_bytes": "trt_max_workspace_size",
    "int8_calibration_table_name": "trt_int8_calibration_table_name",
    "int8_use_native_calibration_table": "trt_int8_use_native_calibration_table",
}
"""Those of these parameters that ONNX Runtime has under other names -> its names."""
_PRECISION = "precision_mode"
_PRECISIONS = {
    "FP32": None,
    "FP16": "trt_fp16_enable",
    "BF16": "trt_bf16_enable",
    "INT8": "trt_int8_enable",
}
"""TensorRT's ``precision_mode`` -> the option that allows it. None: needs no option."""
_CUDA_BOOLS = ("do_copy_in_default_stream", "use_ep_level_unified_stream")
_CUDA_CHOICES = {
    "cudnn_conv_algo_search": ("EXHAUSTIVE", "HEURISTIC", "DEFAULT"),
    "arena_extend_strategy": ("kNextPowerOfTwo", "kSameAsRequested"),
}
"""Options of CUDA that may also stand among the model's parameters, which is deprecated. Their
value there is a number: the index of one of these names."""
_CUDA_PARAMETERS = (*_CUDA_CHOICES, "gpu_mem_limit", "do_copy_in_default_stream")
"""All options of CUDA that may stand among the model's parameters."""
_SHRINKAGE = "memory.enable_memory_arena_shrinkage"
_PARAMETERS = (
    "intra_op_thread_count",
    "inter_op_thread_count",
    "execution_mode",
    "enable_mem_arena",
    "enable_mem_pattern",
    _SHRINKAGE,
)
_PARAMETERS_OF_SERVER = ("FORCE_CPU_ONLY_INPUT_TENSORS", "EXECUTION_ENV_PATH")
"""Parameters that the server itself reads."""
_SESSION_ENTRIES_OF_NATIVE = ("session.use_device_allocator_for_initializers",)
"""The parameters ``session.…`` (entries of ONNX Runtime's session configuration) that the native
backend honours too. The stand-in honours all of them."""
_SPINNING = "session.intra_op.allow_spinning"
"""Off unless the model asks for it: between two batches a thread that spins takes the core that the
server needs to put the next one together. The native backend's threads spin."""
_MOST_THREADS = 1024
"""ONNX Runtime makes them all before it returns: with 50,000 a load takes minutes."""
_IGNORED_OPTIMIZATIONS = ("priority", "cuda", "gather_kernel_buffer_threshold", "eager_batching")


class Provider(NamedTuple):
    """An execution provider of ONNX Runtime and its options."""

    name: str
    options: Mapping[str, str]


@dataclass(frozen=True)
class OnnxOptions:
    """The options of one instance's session. None and 0 stand for ONNX Runtime's own default."""

    graph_level: GraphLevel
    intra_op_threads: int
    inter_op_threads: int
    parallel: bool
    mem_arena: bool | None
    mem_pattern: bool | None
    session_entries: Mapping[str, str]
    """Entries of the session's configuration, by their own names."""
    run_entries: Mapping[str, str]
    """Likewise, of the configuration of each run."""
    providers: tuple[Provider, ...]
    """In order of preference, without the CPU's, which always comes last."""
    op_libraries: tuple[str, ...]
    notes: tuple[str, ...]
    """Lines for the log."""


def read_options(config: Config, device_id: int | None) -> OnnxOptions:
    """The options in a configuration. ``device_id`` is the instance's GPU, None on the CPU. Raises
    ConfigError."""
    parameters = {}
    for name, value in config.get("parameters", {}).items():
        parameters[name] = str(value.get("string_value", ""))
    optimization = config.get("optimization", {})
    level = _integer("optimization.graph.level", optimization.get("graph", {}).get("level", 0))
    if level not in GRAPH_LEVELS:
        raise ConfigError.of("optimization.graph.level", level, "-1, 0, 1 or 2")
    accelerators = optimization.get("execution_accelerators", {})
    on_gpu = accelerators.get("gpu_execution_accelerator", [])
    on_cpu = accelerators.get("cpu_execution_accelerator", [])
    providers: list[Provider] = []
    if device_id is not None:
        providers += _gpu_providers(on_gpu, parameters, device_id)
    providers += _cpu_providers(on_cpu)
    notes = [
        *_parameter_notes(parameters),
        *_optimization_notes(optimization),
        *_input_notes(config),
        *_accelerator_notes(on_gpu, device_id),
    ]
    op_libraries = config.get("model_operations", {}).get("op_library_filename", [])
    return OnnxOptions(
        graph_level=GRAPH_LEVELS[level],
        intra_op_threads=_count(parameters, "intra_op_thread_count"),
        inter_op_threads=_count(parameters, "inter_op_thread_count"),
        parallel=_choice(parameters, "execution_mode", ("0", "1"), default="0") == "1",
        mem_arena=_optional_bool(parameters, "enable_mem_arena"),
        mem_pattern=_optional_bool(parameters, "enable_mem_pattern"),
        session_entries=_session_entries(parameters),
        run_entries=_run_entries(parameters),
        providers=tuple(providers),
        op_libraries=tuple(op_libraries),
        notes=tuple(notes),
    )


def _session_entries(parameters: Mapping[str, str]) -> dict[str, str]:
    entries = {_SPINNING: "0"}
    for name, value in parameters.items():
        if name.startswith("session."):
            entries[name] = value
    return entries


def _run_entries(parameters: Mapping[str, str]) -> dict[str, str]:
    if _SHRINKAGE not in parameters:
        return {}
    return {_SHRINKAGE: parameters[_SHRINKAGE]}


# ------------------------------------------------------------------------------- notes


def _parameter_notes(parameters: Mapping[str, str]) -> list[str]:
    notes = []
    known = (*_PARAMETERS, *_CUDA_PARAMETERS, *_PARAMETERS_OF_SERVER)
    for name in parameters:
        if name == "share_session_between_instances":
            notes.append(f"{name} is ignored: each instance here is a process of its own")
        elif name.startswith("session."):
            if name not in _SESSION_ENTRIES_OF_NATIVE:
                notes.append(f"{name} is honoured here only: the native backend ignores it")
        elif name not in known:
            notes.append(f"parameter {name} is unknown and ignored{nearest(name, known)}")
    return notes


def _optimization_notes(optimization: Config) -> list[str]:
    notes = []
    for name in _IGNORED_OPTIMIZATIONS:
        # The server's JSON has a value for each, even if the configuration has none.
        if optimization.get(name) not in (None, {}, 0, False, "PRIORITY_DEFAULT"):
            notes.append(f"optimization.{name} is ignored on the embedded server")
    return notes


def _input_notes(config: Config) -> list[str]:
    if config.get("max_batch_size", 0) == 0:
        return []
    return [
        f"input {entry['name']} is optional in a model that batches: the native backend refuses it"
        for entry in config.get("input", [])
        if entry.get("optional")
    ]


def _accelerator_notes(on_gpu: list[Config], device_id: int | None) -> list[str]:
    if device_id is not None or not on_gpu:
        return []
    names = ", ".join(str(entry["name"]) for entry in on_gpu)
    return [f"gpu_execution_accelerator {names} is for instances on a GPU; this is none"]


# ------------------------------------------------------------------------------- providers


def _gpu_providers(
    accelerators: list[Config], parameters: Mapping[str, str], device_id: int
) -> list[Provider]:
    """TensorRT if it is asked for, and always CUDA: it runs the operators that TensorRT cannot."""
    device = {"device_id": str(device_id)}
    providers = []
    cuda: dict[str, str] = {}
    for entry in accelerators:
        name = str(entry["name"])
        given = entry.get("parameters", {})
        if name == "tensorrt":
            providers.append(Provider(TENSORRT, {**_tensorrt_options(given), **device}))
        elif name == "cuda":
            cuda |= _cuda_options(given)
        else:
            raise ConfigError.of("gpu_execution_accelerator", name, "tensorrt or cuda")
    cuda |= _cuda_options_of_parameters(parameters)
    return [*providers, Provider(CUDA, {**cuda, **device})]


def _cuda_options(given: Mapping[str, Any]) -> dict[str, str]:
    """The options of the accelerator ``cuda``."""
    options = {}
    for key, value in given.items():
        options[key] = _bool_text(f"cuda {key}", value) if key in _CUDA_BOOLS else str(value)
    return options


def _cuda_options_of_parameters(parameters: Mapping[str, str]) -> dict[str, str]:
    """CUDA's options among the model's parameters."""
    options = {}
    for key in _CUDA_PARAMETERS:
        if key not in parameters:
            continue
        if key in _CUDA_CHOICES:
            names = _CUDA_CHOICES[key]
            numbers = tuple(str(number) for number in range(len(names)))
            number = _choice(parameters, key, numbers, default="0")
            options[key] = names[int(number)]
        else:
            options[key] = parameters[key]
    return options


def _tensorrt_options(given: Mapping[str, Any]) -> dict[str, str]:
    options: dict[str, str] = {}
    for key, value in given.items():
        field = f"tensorrt {key}"
        name = _TENSORRT_RENAMED.get(key, key)
        if key == _PRECISION:
            if value not in _PRECISIONS:
                raise ConfigError.of(field, value, f"one of {', '.join(_PRECISIONS)}")
            enable = _PRECISIONS[value]
            if enable is not None:
                options[enable] = "1"
        elif key in _TENSORRT_BOOLS:
            options[name] = _bool_text(field, value)
        elif key in _TENSORRT_INTS:
            options[name] = str(_integer(field, value))
        elif key in _TENSORRT_TEXTS:
            options[name] = str(value)
        else:
            known = (_PRECISION, *_TENSORRT_BOOLS, *_TENSORRT_INTS, *_TENSORRT_TEXTS)
            raise ConfigError(f"tensorrt parameter {key} is unknown{nearest(key, known)}")
    return options


def _cpu_providers(accelerators: list[Config]) -> list[Provider]:
    """OpenVINO, if it is asked for."""
    providers = []
    for entry in accelerators:
        if entry["name"] != "openvino":
            raise ConfigError.of("cpu_execution_accelerator", entry["name"], "openvino")
        providers.append(Provider(OPENVINO, {"device_type": "CPU"}))
    return providers


# ------------------------------------------------------------------------------- values


def _integer(field: str, value: object) -> int:
    try:
        return int(str(value))
    except ValueError:
        raise ConfigError.of(field, value, "a whole number") from None


def _count(parameters: Mapping[str, str], name: str) -> int:
    value = _integer(name, parameters.get(name, 0))
    if not 0 <= value <= _MOST_THREADS:
        raise ConfigError.of(name, value, f"0 (ONNX Runtime's default) to {_MOST_THREADS}")
    return value


def _choice(
    parameters: Mapping[str, str], name: str, choices: tuple[str, ...], *, default: str
) -> str:
    value = parameters.get(name, default)
    if value not in choices:
        raise ConfigError.of(name, value, f"one of {', '.join(choices)}")
    return value


def _bool_text(field: str, value: object) -> str:
    """``1`` or ``0``, as ONNX Runtime reads it."""
    text = str(value).lower()
    if text not in ("0", "1", "true", "false"):
        raise ConfigError.of(field, value, "0, 1, true or false")
    return "1" if text in ("1", "true") else "0"


def _optional_bool(parameters: Mapping[str, str], name: str) -> bool | None:
    """None if it is not given."""
    if name not in parameters:
        return None
    return _bool_text(name, parameters[name]) == "1"
