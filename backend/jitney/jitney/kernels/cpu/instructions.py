"""The processor's instructions that kernels are made of: AMX, AVX-512 or AVX2, the best it has.

JITNEY_INSTRUCTIONS=avx512 or avx2 in the environment leaves out what is above, in Numba's kernels,
in torch and in oneDNN: for tests and comparisons. It counts for a process, from its start.
"""

import sys
from collections.abc import MutableMapping

from jitney.errors import ConfigError

VARIABLE = "JITNEY_INSTRUCTIONS"
_AVX2 = (
    "avx avx2 bmi bmi2 cx16 f16c fma fxsr lzcnt mmx movbe popcnt sahf sse sse2 sse3 sse4.1 sse4.2 "
    "ssse3 xsave"
)


def limit_instructions(environment: MutableMapping[str, str]) -> None:
    """Set what Numba, torch and oneDNN read, as VARIABLE says. Raises ConfigError for any other
    value of it."""
    asked = environment.get(VARIABLE)
    if not asked:
        return
    if asked == "avx2":
        name, features, onednn = "haswell", [f"+{each}" for each in _AVX2.split()], "AVX2"
    elif asked == "avx512":
        import llvmlite.binding as llvm  # only here: Numba may be missing

        name, onednn = llvm.get_host_cpu_name(), "AVX512_CORE_BF16"
        features = [
            f"{'+' if has else '-'}{each}"
            for each, has in llvm.get_host_cpu_features().items()
            if not each.startswith("amx") and not each.startswith("avx10")
        ]
        features += ["-amx-tile", "-amx-bf16", "-amx-int8"]
    else:
        raise ConfigError.of(VARIABLE, asked, "avx512 or avx2")
    environment["NUMBA_CPU_NAME"], environment["NUMBA_CPU_FEATURES"] = name, ",".join(features)
    environment["ATEN_CPU_CAPABILITY"] = asked
    environment["ONEDNN_MAX_CPU_ISA"], environment["MKL_ENABLE_INSTRUCTIONS"] = (
        onednn,
        asked.upper(),
    )
    if "numba" in sys.modules:
        sys.modules["numba"].core.config.reload_config()
