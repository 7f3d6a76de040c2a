"""Compiles the GPU's attention kernels for a chip that need not be there, and prints what they use.

``python -m tests.kernels.attention.compiled 90 CASES``, CASES as JSON of :class:`Form`. The
kernels' own launches are recorded, over tensors without memory, and compiled with the arguments
that they have. In a process of its own: one that interprets kernels cannot compile them.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_FLOAT8 = torch.float8_e4m3fn
_NAMES = {
    **{dtype: name for name, dtype in DTYPES.items()},
    _FLOAT8: "fp8e4nv",
    torch.int32: "i32",
    torch.int64: "i64",
}


@dataclass(frozen=True)
class Form:
    """A step of a layer."""

    kind: str
    """``decodes`` or ``mixed``."""
    size: int = 128
    dtype: str = "bf16"
    float8: bool = False
    heads: tuple[int, int] = (32, 8)
    block_size: int = 16
    batch_invariant: bool = False
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    transform: bool = True
    """Heads are normed and rotated on the way."""
    in_parts: bool = True


@dataclass(frozen=True)
class Use:
    """What one kernel uses, as its machine code says."""

    kernel: str
    registers: int
    stack: int
    """Bytes: spilled registers and arrays."""
    shared: int
    matrix: int
    """Instructions for the matrix units: HGMMA or HMMA."""
    warpgroup: int
    """Those of a warpgroup, HGMMA, among them."""
    copies: int
    """Asynchronous copies from global to shared memory."""
    wide_copies: int
    """Those of 16 bytes among them."""


def uses(capability: int, forms: list[Form]) -> list[list[Use]]:
    """Of each form's kernels. Compiles in a process of its own."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    cases = json.dumps([asdict(form) for form in forms])
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.attention.compiled", str(capability), cases],
        cwd=Path(__file__).parents[3],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [[Use(**use) for use in each] for each in json.loads(done.stdout.splitlines()[-1])]


def _launches(capability: int, form: Form) -> list[tuple[Any, tuple[Any, ...], dict[str, Any]]]:
    """(kernel, arguments, options) of each launch of a form's step."""
    from jitney.execution.attention import AttentionMetadata, cache_shape
    from jitney.kernels.gpu import gpu_attention as gpu
    from jitney.kernels.gpu import tiles as gpu_tiles

    from tests.kernels.attention.rows import attend_over

    recorded: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []

    def record(kernel: Any) -> Any:
        def run(*arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
            if not warmup:
                recorded.append((kernel, arguments, options))

        return run

    for name in ("attention_kernel", "reduction_kernel", "write_kernel"):
        kernel = getattr(gpu, name)
        kernel.run = record(kernel)
    dtype = DTYPES[form.dtype]
    cache_dtype = _FLOAT8 if form.float8 else dtype
    (heads, kv_heads), size, meta_device = form.heads, form.size, torch.device("meta")
    chip = divmod(capability, 10)
    table = gpu_tiles.look_up(chip, 132, cache_dtype, size, heads // kv_heads, form.batch_invariant)
    attend = gpu.GpuAttention(
        meta_device, cache_dtype, size, heads, kv_heads, batch_invariant=form.batch_invariant
    )
    attend.tiles = table

    def empty(*shape: int, of: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=of, device=meta_device)

    rows, tokens = (3, 3) if form.kind == "decodes" else (3, 70)
    longest = 30000 if form.in_parts else 100
    meta = AttentionMetadata(
        query_start=empty(rows + 1, of=torch.int32),
        context_len=empty(rows, of=torch.int32),
        block_table=empty(rows, 48, of=torch.int32),
        last_block=5,
        slot_mapping=empty(tokens, of=torch.int64),
        positions=empty(tokens, of=torch.int64),
        block_size=form.block_size,
        max_query_len=1 if form.kind == "decodes" else 60,
        max_context_len=longest,
    )
    caches = [empty(*cache_shape(9, form.block_size, kv_heads, size), of=cache_dtype) for _ in "kv"]
    options: dict[str, Any] = {"scale": 0.1, "window": form.window, "softcap": form.softcap}
    if form.sinks:
        options["sinks"] = empty(heads, of=torch.float32)
    if form.float8:
        options |= {f"{x}_scale": empty(kv_heads, of=torch.float32) for x in ("key", "value")}
    if form.transform:
        angles = empty(tokens, size)
        norm = empty(size, of=torch.float32)
        options["transform"] = gpu.HeadTransform(angles, angles, norm, norm, 1e-6)
    qkv = empty(tokens, heads + 2 * kv_heads, size).split([heads, kv_heads, kv_heads], 1)
    attend_over(attend, *qkv, *caches, meta, **options)
    return recorded


def _compile(capability: int, kernel: Any, arguments: tuple[Any, ...], options: Any) -> Use:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature, constants, attributes = {}, {}, {}
    for i, (param, value) in enumerate(zip(kernel.params, arguments, strict=True)):
        kind = "constexpr"
        if not param.is_constexpr and isinstance(value, torch.Tensor):
            kind = "*" + _NAMES[value.dtype]
            if not param.do_not_specialize_on_alignment:
                attributes[(i,)] = [["tt.divisibility", 16]]
        elif not param.is_constexpr and isinstance(value, float):
            kind = "fp32"
        elif (
            not param.is_constexpr and value is not None and (value != 1 or param.do_not_specialize)
        ):
            kind = "i32"
            if value % 16 == 0 and not param.do_not_specialize:
                attributes[(i,)] = [["tt.divisibility", 16]]
        signature[param.name] = kind
        if kind == "constexpr":
            constants[(i,)] = value
    source = ASTSource(kernel, signature, constants, attributes)
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        usage, code = (
            subprocess.run([tool, flag, file.name], capture_output=True, text=True).stdout
            for flag in ("-res-usage", "-sass")
        )
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found is not None, usage
    return Use(
        kernel=kernel.fn.__name__,
        registers=int(found[1]),
        stack=int(found[2]),
        shared=made.metadata.shared,
        matrix=len(re.findall("H(?:G?MMA)", code)),
        warpgroup=code.count("HGMMA"),
        copies=code.count("LDGSTS"),
        wide_copies=len(re.findall(r"LDGSTS\S*\.128", code)),
    )


def main() -> None:
    capability = int(sys.argv[1])
    results = []
    for fields in json.loads(sys.argv[2]):
        form = Form(**{**fields, "heads": tuple(fields["heads"])})
        launches = _launches(capability, form)
        results.append([asdict(_compile(capability, *launch)) for launch in launches])
    print(json.dumps(results))


if __name__ == "__main__":
    main()
