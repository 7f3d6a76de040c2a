"""Kernels for the CPU, compiled by Numba. Imported only where Numba is."""
