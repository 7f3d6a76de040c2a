"""Stand-in for the native TensorRT backend, for an embedded server on a machine with a GPU.

The server loads this file for ``backend: "tensorrt"`` and ``platform: "tensorrt_plan"``; in
NVIDIA's container the C++ backend of that name comes first. Without a GPU, or without TensorRT,
a model is refused with what is missing. ``docs/standins.md`` says what of this is proved.
"""

import importlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils
from jitney.errors import InstallationError, JitneyError, install_extra
from jitney.server_log import log_to_server
from jitney.server_watch import end_with_server
from jitney_server.standins.batch import Batcher, OnDevice
from jitney_server.standins.exchange import answer, model_path, refusal
from jitney_server.standins.signature import check_config, complete_config
from jitney_server.standins.trt_engine import TensorRtEngine, profile_of

_ELSEWHERE = "or serve the same repository in NVIDIA's container, whose own backend takes it"


class TorchMemory:
    """The GPU's memory through torch, which is here because Jitney needs it anyway."""

    def __init__(self, torch: Any, device: str) -> None:
        self._torch = torch
        self._device = torch.device(device)
        self._stream = torch.cuda.Stream(self._device)
        self.stream: int = self._stream.cuda_stream

    def put(self, array: np.ndarray) -> Any:
        source = self._torch.from_numpy(array.reshape(-1).view(np.uint8).copy())
        with self._torch.cuda.stream(self._stream):
            return source.to(self._device)

    def reserve(self, size: int) -> Any:
        with self._torch.cuda.stream(self._stream):
            return self._torch.empty(size, dtype=self._torch.uint8, device=self._device)

    def address(self, buffer: Any) -> int:
        return int(buffer.data_ptr())

    def take(self, buffer: Any, array: np.ndarray) -> None:
        with self._torch.cuda.stream(self._stream):
            host = buffer[: array.nbytes].cpu().numpy()
        array.reshape(-1).view(np.uint8)[:] = host


class TritonPythonModel:
    """One instance of one model."""

    @staticmethod
    def auto_complete_config(auto_complete_model_config: Any) -> Any:
        """Fill in what ``config.pbtxt`` leaves open, from the engine: that needs the GPU."""
        config = auto_complete_model_config.as_dict()
        try:
            path = model_path(
                Path(pb_utils.get_model_dir()), config["default_model_filename"] or "model.plan"
            )
            if not (config.get("input") and config.get("output")):
                trt, torch = _libraries()
                engine = TensorRtEngine(trt, path, TorchMemory(torch, "cuda:0"))
                complete_config(config, engine.signature, engine.max_batch_size)
        except JitneyError as error:
            raise refusal(pb_utils, error) from None
        return auto_complete_model_config

    def initialize(self, args: dict[str, str]) -> None:
        """Load the engine. Raises TritonModelException with the reason if that is impossible."""
        end_with_server()
        log_to_server(pb_utils.Logger)
        config = json.loads(args["model_config"])
        folder = Path(args["model_repository"], args["model_version"])
        try:
            path = model_path(folder, config["default_model_filename"] or "model.plan")
            trt, torch = _libraries()
            if args["model_instance_kind"] != "GPU":
                raise InstallationError(
                    "a TensorRT engine runs on a GPU only, but this instance is on the CPU; "
                    "repair it with: instance_group { kind: KIND_GPU }"
                )
            device = f"cuda:{int(args['model_instance_device_id'])}"
            torch.cuda.set_device(device)
            profile = profile_of(config, args["model_instance_name"])
            engine = TensorRtEngine(trt, path, TorchMemory(torch, device), profile)
            check_config(config, engine.signature)
        except JitneyError as error:
            raise refusal(pb_utils, error) from None
        batching = int(config["max_batch_size"]) > 0
        self._batcher = Batcher(engine.run, engine.signature, batching)

    def execute(self, requests: list[Any]) -> list[Any]:
        """Answer the batch that the server put together."""
        return answer(pb_utils, requests, self._batcher.execute, _adopt)

    def finalize(self) -> None:
        """Give the engine back."""
        del self._batcher


def _adopt(name: str, tensor: Any) -> OnDevice:
    import torch

    adopted: OnDevice = torch.from_dlpack(tensor.to_dlpack()).cpu()
    return adopted


def _libraries() -> tuple[Any, Any]:
    """TensorRT's Python package, and torch with a GPU. Raises InstallationError."""
    import torch

    if not torch.cuda.is_available():
        raise InstallationError(
            "a TensorRT engine needs an NVIDIA GPU and a CUDA build of torch, and there is none "
            f"here; repair it with: serve the model's ONNX file instead (backend: onnxruntime), "
            f"{_ELSEWHERE}"
        )
    try:
        return importlib.import_module("tensorrt"), torch
    except ImportError as error:
        raise InstallationError(
            f"TensorRT's Python package is missing ({error}); "
            f"repair it with: {install_extra('tensorrt')}, {_ELSEWHERE}"
        ) from None
