"""What the processor can do that kernels are compiled for, and how that shapes them.

Kernels exist for these instruction sets. Every function that has a form for each asks here, or asks
:func:`emit.host_has`, while it is compiled:

===================  ==========================================  ====================  ==========
instruction set      product of bfloat16                         product of bytes      registers
===================  ==========================================  ====================  ==========
AMX                  tiles: 16 rows x 16 lanes x 32 elements     tiles, or VNNI        8 tiles
AVX-512 BF16, VNNI   one instruction for 32 elements             one instruction       32 x 512
AVX-512              widened to float32, two FMA                 two widening steps    32 x 512
AVX2                 widened to float32, two FMA                 two widening steps    16 x 256
===================  ==========================================  ====================  ==========

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
    """Whether the processor that Numba compiles for has a tile unit for bfloat16."""
    return host_has("amx-bf16")


def may_use_amx() -> bool:
    """Whether this process may use a tile unit: asks Linux for the right. Asking twice is fine."""
    if not host_has_amx() or not sys.platform.startswith("linux"):
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    answer = libc.syscall(_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA)
    return answer == 0


def must_widen_bf16() -> bool:
    """Whether the processor has no product of bfloat16, so that elements are widened to float32."""
    return not may_use_amx() and not host_has("avx512bf16")


def multiplies_bytes() -> bool:
    """Whether one instruction multiplies bytes and adds them up in 32 bits (VNNI)."""
    return host_has("avx512vnni") or host_has("avxvnni")


def accumulators() -> int:
    """Vectors of 16 lanes that stay in registers at once.

    24 of AVX-512's 32 registers, which leaves some for four vectors of the second factor and a
    broadcast unit. Or 6 of AVX2: a vector takes two of its 16 registers.
    """
    return 24 if host_has("avx512f") else 6


def instruction_set() -> str:
    """What kernels are made of here: ``amx``, ``avx512`` with what it has of bfloat16 and bytes,
    ``avx2``, or ``vectors`` of another kind."""
    if may_use_amx():
        return "amx"
    if host_has("avx512f"):
        extensions = [name for name in ("bf16", "vnni") if host_has(f"avx512{name}")]
        return " ".join(["avx512", *extensions])
    return "avx2" if host_has("avx2") else "vectors"
