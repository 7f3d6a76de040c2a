"""What the processor has that kernels are compiled for, and how many registers.

Kernels exist for these instruction sets. A function that emits different instructions for them
asks here, or asks :func:`emit.host_has`, while it is compiled:

===================  ========  ===================================================================
instruction set      elements  what one instruction multiplies
===================  ========  ===================================================================
AMX                  bfloat16  tiles: 16 rows x 32 inputs x 16 outputs
AMX                  bytes     tiles: 16 rows x 64 inputs x 16 outputs
AVX-512 BF16         bfloat16  2 inputs x 16 outputs
AVX-512 VNNI         bytes     4 inputs x 16 outputs
AVX-512              bfloat16  (widened to float32) 1 input x 16 outputs
AVX-512              bytes     (widened to 16 bits) 2 inputs x 16 outputs
AVX2                 bfloat16  (widened to float32) 1 input x 8 outputs
AVX2                 bytes     (widened to 16 bits) 2 inputs x 8 outputs
===================  ========  ===================================================================

AVX-512 has 32 registers of 512 bits, AVX2 has 16 of 256 bits. AMX has 8 tiles besides those of
AVX-512.

Called by kernels while they are compiled, and by those who pick a kernel.
"""

import ctypes
import sys

from jitney.kernels.cpu.emit import host_has

# Linux: arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA), see its Documentation/arch/x86/xstate.
_ARCH_PRCTL = 158
_ARCH_REQ_XCOMP_PERM = 0x1023
_XFEATURE_XTILEDATA = 18


def host_has_amx() -> bool:
    """Whether the processor that Numba compiles for has a tile unit (AMX) for all that kernels use
    it for: bfloat16 and bytes. (A virtual machine may hide one of the two.)"""
    return host_has("amx-bf16") and host_has("amx-int8")


def may_use_amx() -> bool:
    """Whether this process may use a tile unit. Linux grants it on request; asking twice is fine.

    Kernels contain code for the tile unit wherever the processor has one. The host passes them the
    answer as an argument, ``use_tiles``."""
    if not host_has_amx() or not sys.platform.startswith("linux"):
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    answer = libc.syscall(_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA)
    return answer == 0


def must_widen_bf16() -> bool:
    """Whether this process has no instruction for products of bfloat16. Then the host picks kernels
    whose left elements have been widened to float32 (WIDE in ``simd``)."""
    return not may_use_amx() and not host_has("avx512bf16")


def multiplies_bytes() -> bool:
    """Whether one instruction multiplies bytes and adds them up in 32 bits (VNNI)."""
    return host_has("avx512vnni") or host_has("avxvnni")


def accumulators() -> int:
    """How many sums, vectors of 16 lanes, a product may keep in registers at once.

    AVX-512: 24 of 32 registers. The other 8 are for four vectors of the right factor, a broadcast
    unit of the left one, and what is computed in between. AVX2: 6, which take two registers each,
    so 12 of 16.
    """
    return 24 if host_has("avx512f") else 6


def instruction_set() -> str:
    """Which instructions kernels are made of here, for the log: ``amx``; ``avx512``, followed by
    ``bf16`` and ``vnni`` if the processor has these; ``avx2``; or ``vectors`` of another kind."""
    if may_use_amx():
        return "amx"
    if host_has("avx512f"):
        extensions = [name for name in ("bf16", "vnni") if host_has(f"avx512{name}")]
        return " ".join(["avx512", *extensions])
    return "avx2" if host_has("avx2") else "vectors"
