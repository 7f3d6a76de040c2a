"""What this process may use of the machine: the device and its dtypes, cores, memory. Also how
numbers get to the device.

A container sees the host's figures in most places; ``cgroups`` reads the limits that bind it.
"""

import errno
import logging
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from jitney import cgroups
from jitney.errors import ConfigError, LoadError, first_line

_log = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

_BYTES_PER_THREAD = 64 << 20
"""Weights that keep one thread busy in the proof at load."""


def resolve_device(name: str) -> torch.device:
    """The device of option ``device``. Raises ConfigError if it is not here."""
    if name == "auto":
        return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    if not re.fullmatch(r"cpu|cuda(:\d{1,4})?", name):
        raise ConfigError.of("device", name, "auto, cpu, cuda or cuda:N")
    if name == "cpu":
        return torch.device("cpu")
    number = name.removeprefix("cuda").removeprefix(":")
    index = int(number) if number else 0
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if index >= count:
        raise ConfigError.of("device", name, f"a device of this machine, which has {count} GPUs")
    return torch.device("cuda", index)


def enter_device(device: torch.device) -> None:
    """Make a GPU the calling thread's current device. Torch's own operations run where their
    tensors are, but kernels that torch does not know run on the current device."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


@contextmanager
def threads_for(num_bytes: int) -> Iterator[None]:
    """A context in which torch uses fewer threads if the model's weights have few bytes.

    After each operation all threads wait for the slowest. If other processes use the cores too,
    that can take milliseconds, and the proof at load runs a thousand operations on a dozen tokens.
    """
    before = torch.get_num_threads()
    enough = 1 + num_bytes // _BYTES_PER_THREAD
    torch.set_num_threads(min(before, enough))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def synchronize(device: torch.device) -> None:
    """Wait for everything that was launched on a GPU. Raises the error of a kernel that failed."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def to_device(
    values: Sequence[object] | npt.NDArray, device: torch.device, dtype: npt.DTypeLike = None
) -> Tensor:
    """The values on ``device``. An array keeps its type; others get ``dtype``, by default int64.

    On a CPU the tensor shares an array's memory. To a GPU the copy goes through pinned memory and
    is not waited for: torch's allocator reuses that memory only when the copy is over.
    """
    array = values if isinstance(values, np.ndarray) else np.array(values, dtype or np.int64)
    host = torch.from_numpy(array)
    if device.type != "cuda":
        return host
    return host.pin_memory().to(device, non_blocking=True)


def resolve_dtype(
    name: str,
    stored: torch.dtype,
    device: torch.device,
    key: str = "dtype",
    *,
    widened: bool = False,
    has_quantized_weights: bool = False,
) -> torch.dtype:
    """Choose the dtype for option ``key`` with value ``name``, for a checkpoint in ``stored``.

    ``auto`` is:

    - on a GPU: ``stored``;
    - on a CPU, for float32 weights that stay float32: float32;
    - on a CPU, for all other weights: bfloat16 if it is fast, else float32.

    ``has_quantized_weights``: the weights are, or will be, of 8 or 4 bits. ``widened``: all of the
    model's layers are computed by kernels that read bfloat16 and compute in float32. Then bfloat16
    is fast on any CPU.

    Raises ConfigError for float16 on a CPU, for which there are no fast kernels.
    """
    if name != "auto":
        dtype = DTYPES[name]
    elif device.type == "cuda" or (stored == torch.float32 and not has_quantized_weights):
        dtype = stored
    else:
        # On a CPU: weights of 16 bits, or quantized ones, even if they were float32 before. The
        # kernels of 8 and 4 bits compute in bfloat16 alone: in float32 such layers run in plain
        # torch.
        is_fast = widened or cpu_has_bfloat16()
        dtype = torch.bfloat16 if is_fast else torch.float32
        _log.info("dtype auto: %s, for weights stored in %s", dtype, stored)
    if device.type == "cpu" and dtype == torch.float16:
        raise ConfigError.of(key, name, "auto, float32 or bfloat16 on a CPU")
    return dtype


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a library raised this error because memory could not be allocated, on a CPU or on a
    GPU. The memory is at fault then, not the model."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    if isinstance(error, OSError):  # of mmap
        return error.errno == errno.ENOMEM
    # torch's allocator for CPUs has no class of its own.
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)


@contextmanager
def typed_errors() -> Iterator[None]:
    """A context that nothing but a LoadError or a MemoryError leaves, whatever a library raises:
    transformers' modules raise any class of error for a configuration that nobody has tried."""
    try:
        yield
    except (LoadError, MemoryError):
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise MemoryError(str(error)) from error
        _log.exception("the load failed")
        raise LoadError(
            f"the load failed with an error that no check of it foresaw ({first_line(error)}): the "
            "log has where; options attention 'reference', prepack false and fuse false leave out "
            "what makes the model faster"
        ) from error


def cpu_has_bfloat16() -> bool:
    """Whether the processor has instructions for bfloat16 products."""
    found = torch.cpu.get_capabilities()
    return any(found.get(name) for name in ("avx512_bf16", "amx_bf16", "bf16", "sve_bf16"))


def available_cores() -> int:
    """CPU cores that this process may run on: its affinity, and its CPU quota rounded up."""
    cores = len(os.sched_getaffinity(0))
    quota = cgroups.cpu_quota()
    return cores if quota is None else min(cores, quota)


def available_memory(device: torch.device) -> int:
    """Bytes that could be allocated on ``device`` now."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return cgroups.free_memory()
