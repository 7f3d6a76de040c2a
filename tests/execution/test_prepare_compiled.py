"""The kernel that unpacks a step, compiled for real chips: no spills, no shared memory.

In a process of its own, where nothing is interpreted. No GPU is needed.
"""

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

_COMPILE = """
import pathlib, subprocess, sys, tempfile
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from jitney.execution.gpu.prepare import LANES, prepare

assert not triton.knobs.runtime.interpret
TOOLS = pathlib.Path(triton.__file__).parent / "backends/nvidia/bin"
TENSORS = {
    "packed": "*i32", "sampled": "*i64", "tables": "*i32", "ids": "*i64", "positions": "*i64",
    "slots": "*i64", "query_start": "*i32", "context_len": "*i32", "block_table": "*i32",
}
constants = {"BLOCK_SIZE": int(sys.argv[2]), "LANES": LANES}
signature = {
    name: "constexpr" if name in constants else TENSORS.get(name, "i32")
    for name in prepare.arg_names
}
source = ASTSource(fn=prepare, signature=signature, constexprs=constants)
compiled = triton.compile(source, target=GPUTarget("cuda", int(sys.argv[1]), 32))
assert compiled.metadata.shared == 0
with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
    file.write(compiled.asm["cubin"])
    file.flush()
    usage = subprocess.check_output([TOOLS / "cuobjdump", "-res-usage", file.name], text=True)
assert " STACK:0 " in usage and " LOCAL:0 " in usage, usage
"""


@pytest.mark.parametrize("chip", [90, 80])
@pytest.mark.parametrize("block_size", [16, 24])
def test_it_compiles(chip: int, block_size: int) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", _COMPILE, str(chip), str(block_size)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
