"""Fused modules: recognised, checked, and built from the kernels of a device (today a CPU's)."""
