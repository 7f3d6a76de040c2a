"""Part ``environment``: the machine, the versions, and the two ceilings of this very device.

The ceilings are what the bars are ratios of: a device-to-device copy, counting bytes read and
written, and an 8192 x 8192 x 8192 bf16 product of random matrices.
"""

import importlib
import platform
from importlib import metadata

import torch

from benchmarks.device.supervise import Bench
from benchmarks.device.timing import time_calls

_PACKAGES = ("torch", "triton", "transformers", "numpy", "msgspec", "accelerate", "torchao")


def device_of(bench: Bench) -> torch.device:
    """The GPU, or the CPU in a rehearsal. Raises RuntimeError if there is no GPU to measure."""
    if bench.tiny:
        torch.set_num_threads(2)
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise RuntimeError("no CUDA device is here; --tiny rehearses on a CPU")
    return torch.device("cuda", 0)


def run(bench: Bench) -> None:
    """Facts first, then the two ceilings."""
    device = device_of(bench)
    versions = [f"Python {platform.python_version()}"]
    for name in _PACKAGES:
        try:
            versions.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            versions.append(f"no {name}")
    bench.fact("versions", ", ".join(versions))
    bench.fact("device", _describe(device))
    importlib.import_module("jitney.config")  # says at once what is missing of our own
    bench.case("copy bandwidth", lambda: _copy(bench, device))
    bench.case("matrix product", lambda: _product(bench, device))


def _describe(device: torch.device) -> str:
    if device.type == "cpu":
        return f"{platform.machine()} processor, a rehearsal"
    info = torch.cuda.get_device_properties(device)
    cache = getattr(info, "L2_cache_size", 0) / 1e6
    return (
        f"{info.name}, {info.multi_processor_count} SMs, compute {info.major}.{info.minor}, "
        f"{info.total_memory / 2**30:.0f} GiB, L2 {cache:.0f} MB, "
        f"CUDA {torch.version.cuda}"
    )


def _copy(bench: Bench, device: torch.device) -> None:
    size = 1 << 22 if bench.tiny else 1 << 32
    source = torch.empty(size, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    timing = time_calls([lambda: target.copy_(source)], device, graph=False)
    bandwidth = 2 * size / timing.seconds
    bench.fact("bandwidth", bandwidth)
    bench.add(
        "device-to-device copy, read + write",
        value=bandwidth / 1e9, unit="GB/s", details=timing.details,
    )  # fmt: skip


def _product(bench: Bench, device: torch.device) -> None:
    n = 256 if bench.tiny else 8192
    left, right = (torch.randn(n, n, device=device, dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(left)
    timing = time_calls([lambda: torch.mm(left, right, out=out)], device, graph=False)
    rate = 2 * n**3 / timing.seconds
    bench.fact("matrix_rate", rate)
    bench.add(
        f"bf16 matrix product, {n}³", value=rate / 1e12, unit="TFLOP/s", details=timing.details
    )
