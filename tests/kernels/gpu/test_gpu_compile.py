"""The kernels of fused modules, compiled for real chips: no spills, wide reads, matrix units.

In a process of its own, where nothing is interpreted. No GPU is needed.
"""

import subprocess
import sys

import pytest

pytest.importorskip("triton")

_COMPILE = """
import pathlib, subprocess, sys, tempfile
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from jitney.kernels.gpu import adapter_products as adapters
from jitney.kernels.gpu import invariant_product as products
from jitney.kernels.gpu import norm_kernels as norm

assert not triton.knobs.runtime.interpret
TOOLS = pathlib.Path(triton.__file__).parent / "backends/nvidia/bin"
TYPES = dict(
    indices="*i64", branch_scale="*fp32", scale="*fp32", bias="*fp32",
    branch_epsilon="fp32", epsilon="fp32",
    out_stride="i32", branch_stride="i32", residual_stride="i32", stride="i32", rows="i32",
    blocks="*i64", first_entry="i32", rank_tiles="i32", inputs="i32",
)
chip, kind = int(sys.argv[1]), sys.argv[2]
dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[kind]
shared = {80: 163, 90: 227}[chip] << 10


def build(kernel, constants, **options):
    names = kernel.arg_names
    types = {name: TYPES.get(name, "*" + kind) for name in names}
    source = ASTSource(
        fn=kernel,
        signature={name: "constexpr" if name in constants else types[name] for name in names},
        constexprs=constants,
        attrs={
            (i,): [["tt.divisibility", 16]]
            for i, name in enumerate(names)
            if name not in constants
            and (types[name][0] == "*" or name.endswith(("stride", "inputs")))
        },
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", chip, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = subprocess.check_output([TOOLS / "cuobjdump", "-res-usage", file.name], text=True)
        code = subprocess.check_output([TOOLS / "nvdisasm", "-c", file.name], text=True)
    assert " STACK:0 " in usage and " LOCAL:0 " in usage, usage
    assert compiled.metadata.shared <= shared, compiled.metadata.shared
    return code


for width in (4096, 16384):
    constants = dict(WIDTH=width, BLOCK=width, bias=None)
    code = build(norm.add_norm_kernel, constants, num_warps=norm.warps_for(width))
    assert "LDG.E.128" in code and "STG.E.128" in code, "not 16 bytes at a time"
constants = dict(WIDTH=14336, BLOCK=1024, ACTIVATION="silu")
code = build(norm.gate_kernel, constants, num_warps=4)
assert "LDG.E.128" in code and "STG.E.128" in code, "not 16 bytes at a time"
for outputs, inputs in ((28672, 4096), (4096, 14336), (160, 100)):
    tiles = products.invariant_tiles(outputs, dtype)
    code = build(
        products.product_kernel,
        dict(
            N=outputs, K=inputs, STRIDE_N=inputs, STRIDE_K=1, GROUP=16,
            BLOCK_M=tiles.rows, BLOCK_N=tiles.outputs, BLOCK_K=tiles.inputs,
        ),
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )
    units = "HGMMA" if chip == 90 else "HMMA"
    assert (units in code) == (kind != "fp32"), "float32 keeps all its bits"
tile = dict(BLOCK_TOKENS=adapters.BLOCK_TOKENS, RANKS=adapters.RANKS)
code = build(adapters.shrink_kernel, dict(DEPTH=128, **tile), num_warps=4, num_stages=4)
assert "LDGSTS.E.BYPASS.128" in code, "not 16 bytes at a time"
assert ("HMMA" in code) == (kind != "fp32"), "float32 keeps all its bits"
constants = dict(COLUMNS=128, EVEN=True, **tile)
code = build(adapters.expand_kernel, constants, num_warps=4, num_stages=2)
assert "LDG.E.128" in code and "STG.E.128" in code, "not 16 bytes at a time"
"""


@pytest.mark.slow
@pytest.mark.parametrize(("chip", "kind"), [(90, "bf16"), (90, "fp32"), (80, "fp16")])
def test_kernels_compile_without_spills(chip: int, kind: str) -> None:
    subprocess.run([sys.executable, "-c", _COMPILE, str(chip), kind], check=True)
