"""Kernels for the CPU, compiled by Numba. Most modules are imported only where Numba is."""

import os

from jitney.kernels.cpu.instructions import limit_instructions

limit_instructions(os.environ)
