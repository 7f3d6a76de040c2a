"""Quantized linear layers: made at load, or read from a quantized checkpoint.

- The layers: ``eight_bits`` (with ``e4m3``) and ``four_bits``; on a device without kernels of ours,
  ``torchao`` (``devices`` says which that is).
- Made at load, from a model that is not quantized: ``quantize``.
- Read: ``quantized_checkpoint`` chooses how. ``stored_layers`` finds the quantized layers of GPTQ,
  AWQ and compressed-tensors, ``weight_formats`` puts layers of ours in their place, and
  ``packed_integers`` unpacks their integers. ``gguf_weights`` does all of this for GGUF, and
  ``dequantized_weights`` (with ``stored_weights``) for formats that no layer of ours has.
  ``transformers_reading`` has transformers read the stored tensors as they are. ``packages`` says
  which packages some of this needs.

How a load checks them. Each load proves a model (``execution.probe``): its logits on a paged cache
must be those of eager attention. Here both sides use the quantized weights, and neither rounds
activations, so the tolerances are those of models that are not quantized. Rounding activations to
8 bits would hide errors: a difference in the last bit moves a value to the next 8-bit value, which
in e4m3 is up to 1/8 of the value away, and each layer adds to it. After 32 layers in bfloat16 the
difference would be 0.11 of the logits' spread; without the rounding it is 0.02. The rounding is
checked afterwards: one product of each shape is compared with a reference.

Outliers of int8 on a CPU. A row of activations is rounded to bytes with one scale, and a few large
elements would make that scale coarse for all others. Such an element is an outlier: it is not
rounded, and its products are added in float32. ``eight_bits`` has the definition
(``_outlier_bounds``). A row has at most 15 outliers, which depend on that row alone.
"""
