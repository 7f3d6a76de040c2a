"""Fused modules, recognised, checked and built from the kernels of whatever device there is."""
