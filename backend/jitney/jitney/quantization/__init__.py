"""Quantized linear layers: made at load, or read from a quantized checkpoint."""
