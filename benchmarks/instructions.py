"""Fewer instructions than the processor has: what Numba, torch, oneDNN and MKL must find in their
environment so that a process uses AVX-512 without AMX, or AVX2 and nothing above.
"""

_AVX2 = (
    "avx avx2 bmi bmi2 cx16 f16c fma fxsr lzcnt mmx movbe popcnt sahf sse sse2 sse3 sse4.1 sse4.2 "
    "ssse3 xsave"
)
INSTRUCTIONS = ("all", "avx512", "avx2")


def limited_to(instructions: str) -> dict[str, str]:
    """Variables for one of INSTRUCTIONS. Where the processor has no more they change nothing."""
    if instructions == "all":
        return {}
    if instructions == "avx2":
        name = "haswell"
        features = [f"+{each}" for each in _AVX2.split()]
        onednn = "AVX2"
    else:
        import llvmlite.binding as llvm  # only here: Numba may be missing

        if not llvm.get_host_cpu_features().get("avx512f"):
            raise ValueError("this processor has no AVX-512")
        name = llvm.get_host_cpu_name()
        onednn = "AVX512_CORE_BF16"
        above = ("amx", "avx10")
        found = llvm.get_host_cpu_features().items()
        features = [
            f"{'+' if has and not feature.startswith(above) else '-'}{feature}"
            for feature, has in found
        ]
    return {
        "NUMBA_CPU_NAME": name,
        "NUMBA_CPU_FEATURES": ",".join(features),
        "ATEN_CPU_CAPABILITY": instructions,
        "ONEDNN_MAX_CPU_ISA": onednn,
        "MKL_ENABLE_INSTRUCTIONS": instructions.upper(),
    }
