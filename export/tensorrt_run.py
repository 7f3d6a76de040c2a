"""A TensorRT engine as a function of arrays, so that ``parity`` can compare it with the module.

Needs the GPU that the engine was built for and a torch with CUDA, whose tensors are its memory.
"""

from typing import Any

import numpy as np
import torch

from export.errors import CheckError, MissingToolError
from export.parity import Run
from export.recipe import NamedArrays


def require_gpu() -> None:
    """Raises MissingToolError where no engine can be compared."""
    if not torch.cuda.is_available():
        build = torch.version.cuda or "no CUDA"
        raise MissingToolError(
            "an engine is compared with the original on an NVIDIA GPU, and torch finds none (torch "
            f"{torch.__version__}, built with {build}): install a CUDA build of torch on a machine "
            "with a GPU, or start the container with --gpus all"
        )


def engine_run(trt: Any, plan: bytes) -> Run:
    """The serialized engine, loaded on the current GPU."""
    require_gpu()
    logger = trt.Logger(trt.Logger.ERROR)
    engine = trt.Runtime(logger).deserialize_cuda_engine(plan)
    if engine is None:
        raise CheckError("TensorRT does not load the engine that it has just built")
    context = engine.create_execution_context()
    names = [engine.get_tensor_name(index) for index in range(engine.num_io_tensors)]
    outputs = [n for n in names if engine.get_tensor_mode(n) == trt.TensorIOMode.OUTPUT]
    stream = torch.cuda.Stream()

    def run(inputs: NamedArrays) -> dict[str, np.ndarray]:
        with torch.cuda.stream(stream):
            # Kept in a variable: the engine reads their memory until the stream is done.
            given = {name: torch.from_numpy(array).cuda() for name, array in inputs.items()}
            for name, tensor in given.items():
                if not context.set_input_shape(name, tuple(tensor.shape)):
                    raise CheckError(
                        f"the engine's profile does not admit shape {list(tensor.shape)} of input "
                        f"{name!r}"
                    )
                context.set_tensor_address(name, tensor.data_ptr())
            made = {name: _empty(trt, engine, context, name) for name in outputs}
            for name, tensor in made.items():
                context.set_tensor_address(name, tensor.data_ptr())
            if not context.execute_async_v3(stream.cuda_stream):
                raise CheckError("the engine fails to run")
        stream.synchronize()
        return {name: tensor.cpu().numpy() for name, tensor in made.items()}

    return run


def _empty(trt: Any, engine: Any, context: Any, name: str) -> torch.Tensor:
    kind = torch.from_numpy(np.empty(0, trt.nptype(engine.get_tensor_dtype(name)))).dtype
    return torch.empty(tuple(context.get_tensor_shape(name)), dtype=kind, device="cuda")
