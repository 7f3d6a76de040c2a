"""Benchmarks. This file makes the folder a package, so that an installed package of this name is
not imported instead.

Each benchmark is a program; what libraries log at import is not printed. Engines that are compared
run in separate environments, which may lack Jitney.
"""

import contextlib

with contextlib.suppress(ImportError):
    from jitney.engine.quiet import quiet_imports

    quiet_imports()
