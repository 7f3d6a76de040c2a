"""Quantized linear layers: made at load, or read from a quantized checkpoint.

``quantize`` makes them of a model that was read. ``quantized_checkpoint``, ``stored_layers`` and
``stored_weights`` read GPTQ, AWQ and compressed-tensors, and ``packed_integers`` unpacks them;
``gguf_weights`` reads GGUF. ``transformers_reading`` is what they tell transformers' own reading.
``eight_bits`` (with ``e4m3``) and ``four_bits`` are the formats, ``torchao`` their form without a
kernel of ours; ``devices`` says where there are kernels.

How a load checks them: the proof uses the rounded weights and unrounded activations, at the
tolerances of unquantized models. Rounding activations to 8 bits would hide errors: a difference in
the last bit moves a value to the next 8-bit value, in e4m3 up to 1/8 away, and each layer adds to
it. After 32 layers in bfloat16 the difference is 0.11 of the logits' spread, against 0.02 without.
Then one product of each shape is compared with a reference.

Outliers of int8 on a CPU: up to 15 elements of a row that are larger than 24 times the mean size of
the others are left out. The scale follows the rest, and the products of the outliers are added in
float32. If they are more than 15, the bound is doubled until they are not. The row alone decides.
"""
