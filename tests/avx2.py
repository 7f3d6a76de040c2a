"""What depends on the processor, as if it had AVX2 and nothing above: `make test-avx2`.

    python -m tests.avx2 [arguments of pytest]

On a processor that has no more the variables change nothing. ONNX Runtime has no such switch: where
the processor has AVX-512, the tests of int8 models run once more in qemu-user.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FEATURES = "avx avx2 bmi bmi2 cx16 f16c fma fxsr lzcnt mmx movbe popcnt sahf sse sse2 sse3 sse4.1"
ENVIRONMENT = {
    "ATEN_CPU_CAPABILITY": "avx2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    "NUMBA_CPU_NAME": "haswell",
    "NUMBA_CPU_FEATURES": ",".join(f"+{each}" for each in f"{FEATURES} sse4.2 ssse3 xsave".split()),
    "NUMBA_CACHE_DIR": str(ROOT / "build" / "numba-avx2"),
}
TESTS = ["tests/kernels/cpu", "tests/kernels/attention/test_attention.py", "tests/quantization"]
# The test models alone: the encoder takes minutes in qemu.
INT8 = ["tests/export/test_precision.py", "-k", "int8"]


def main(arguments: list[str]) -> int:
    """Run both parts; returns the exit status."""
    pytest = [sys.executable, "-m", "pytest", "-m", "not slow and not gpu", *arguments]
    environment = {**os.environ, **ENVIRONMENT}
    failed = subprocess.run([*pytest, *TESTS], cwd=ROOT, env=environment, check=False).returncode
    if "avx512f" not in Path("/proc/cpuinfo").read_text(encoding="utf-8"):
        emulator: list[str] = []
    elif qemu := find_qemu():
        emulator = [qemu, "-cpu", "Haswell"]
    else:
        print("int8 models were not tried with AVX2: qemu-user is missing (as root: apt-get).")
        return failed
    command = [*emulator, *pytest, "-p", "no:xdist", *INT8]
    return subprocess.run(command, cwd=ROOT, check=False).returncode or failed


def find_qemu() -> str | None:
    """qemu-user, which root gets from Debian."""
    if shutil.which("qemu-x86_64") is None and os.geteuid() == 0 and shutil.which("apt-get"):
        apt = ["apt-get", "-qq", "-o", "DPkg::Lock::Timeout=300"]
        for step in (["update"], ["install", "--no-install-recommends", "-y", "qemu-user"]):
            subprocess.run([*apt, *step], stdout=subprocess.DEVNULL, check=False)
    return shutil.which("qemu-x86_64")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
