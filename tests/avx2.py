"""What depends on the processor, as if it had AVX2 and nothing above: `make test-avx2`.

    python -m tests.avx2 [arguments of pytest]

On a processor that has no more the variables change nothing. ONNX Runtime has no such switch: where
the processor has AVX-512, int8 models run in qemu-user.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from benchmarks.instructions import limited_to
from tests.export.emulated import EMULATOR

ROOT = Path(__file__).resolve().parents[1]
TESTS = [
    "tests/kernels/cpu",
    "tests/kernels/attention/test_attention.py",
    "tests/kernels/test_fuse.py",
    "tests/execution",
    "tests/quantization",
    "tests/adapters",
    "tests/export/test_precision.py",
]
# Of these files, what computes on another kind of processor, or nothing.
ELSEWHERE = [
    "bit_for_bit", "hopper", "which_layers", "quality", "refused", "half_precision", "smoothing",
]  # fmt: skip


def main(arguments: list[str]) -> int:
    """Run them; returns the exit status."""
    environment = {**os.environ, **limited_to("avx2")}
    if "avx512f" in Path("/proc/cpuinfo").read_text(encoding="utf-8"):
        if qemu := find_qemu():
            environment[EMULATOR] = f"{qemu} -cpu Haswell"
        else:
            print("int8 models are not tried with AVX2: qemu-user is missing (as root: apt-get).")
    chosen = ["-m", "not slow and not gpu", "-k", f"not ({' or '.join(ELSEWHERE)})"]
    command = [sys.executable, "-m", "pytest", *chosen, *arguments, *TESTS]
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


def find_qemu() -> str | None:
    """qemu-user, which root gets from Debian."""
    if shutil.which("qemu-x86_64") is None and os.geteuid() == 0 and shutil.which("apt-get"):
        apt = ["apt-get", "-qq", "-o", "DPkg::Lock::Timeout=300"]
        for step in (["update"], ["install", "--no-install-recommends", "-y", "qemu-user"]):
            subprocess.run([*apt, *step], stdout=subprocess.DEVNULL, check=False)
    return shutil.which("qemu-x86_64")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
