"""The kernels of sampling, compiled for real chips: no spills, and 16 bytes read at once.

In a process of its own, where nothing is interpreted. No GPU is needed.
"""

import subprocess
import sys

import pytest

pytest.importorskip("triton")

_COMPILE = """
import pathlib, subprocess, sys, tempfile
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from jitney.execution.gpu import edit_kernels, sampling_kernels

assert not triton.knobs.runtime.interpret
TOOLS = pathlib.Path(triton.__file__).parent / "backends/nvidia/bin"
TYPES = dict(
    stride="i32", edited="*fp32", places="*i32", raw_maxima="*fp32", words="*i64", maxima="*fp32",
    sums="*fp32", lists="*i32", kept="*fp32", out="*i64", num_rows="i32", delta="i32", vocab="i32",
    headers="*i64", tokens="*i32", values="*fp32", pool="*i32",
    contexts="*i32",
)
chip, logits, aligned = int(sys.argv[1]), sys.argv[2], sys.argv[3] == "aligned"


def build(kernel, warps, **constants):
    types = dict(TYPES, logits=logits)
    unaligned = {"num_rows", "delta"} | (set() if aligned else {"stride", "vocab"})
    names = kernel.arg_names
    source = ASTSource(
        fn=kernel,
        signature={name: "constexpr" if name in constants else types[name] for name in names},
        constexprs=constants,
        attrs={
            (i,): [["tt.divisibility", 16]]
            for i, name in enumerate(names) if name not in unaligned and name not in constants
        },
    )
    compiled = triton.compile(
        source, target=GPUTarget("cuda", chip, 32), options={"num_warps": warps}
    )
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = subprocess.check_output([TOOLS / "cuobjdump", "-res-usage", file.name], text=True)
        code = subprocess.check_output([TOOLS / "nvdisasm", "-c", file.name], text=True)
    assert " STACK:0 " in usage and " LOCAL:0 " in usage, usage
    assert compiled.metadata.shared <= 48 << 10
    return code


for draws in (False, True):
    # Edited logits are f32: what is built for those is built for all of them.
    for edited in (False, True) if logits == "*fp32" else (False,):
        constants = dict(CHUNKS=2048, ANY_DRAWS=draws, EDITED=edited)
        code = build(sampling_kernels.scan, 4, **constants)
        assert not aligned or "LDG.E.128" in code, "not 16 bytes at a time"
        build(sampling_kernels.select, 8, RAW=64, **constants)
build(edit_kernels.edit, 8, RAW=64)
"""


@pytest.mark.slow
@pytest.mark.parametrize("chip", [90, 80])
@pytest.mark.parametrize("dtype", ["*bf16", "*fp16", "*fp32"])
@pytest.mark.parametrize("rows", ["aligned", "odd"])
def test_kernels_compile_without_spills(chip: int, dtype: str, rows: str) -> None:
    subprocess.run([sys.executable, "-c", _COMPILE, str(chip), dtype, rows], check=True)
