"""What Numba imports late."""

import subprocess
import sys

_PROGRAM = """
import sys
from numba import cfunc, types
from jitney.kernels.cpu.compiled import Kernel, import_compiler
before = set(sys.modules)
import_compiler()
imported = set(sys.modules)
Kernel(lambda address: None)
print(len(imported - before), sorted(set(sys.modules) - imported))
"""


def test_a_kernel_imports_nothing_once_the_compiler_is_imported() -> None:
    """Else every engine that is forked from a fork server would do it again."""
    said = subprocess.run([sys.executable, "-c", _PROGRAM], stdout=subprocess.PIPE, check=True)
    number, _, late = said.stdout.decode().strip().partition(" ")
    assert int(number) > 10, "what there is to import"
    assert late == "[]"
