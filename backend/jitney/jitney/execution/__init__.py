"""The model in plain torch: loading and checking, a step's inputs, attention, sampling.

A checkpoint is loaded with transformers' own modules, and attention is replaced through
transformers' ``AttentionInterface``: our function gets q, k and v after rotary embedding and, as
the keyword argument ``paged``, the step's metadata. All rows of a step are flattened to
[1, tokens] with their own positions; there is no mask.

What cannot run so is refused at load, by name and reason: ``checkpoint`` judges files
(``gguf_file`` those of GGUF), ``support`` judges configurations, and ``probe`` runs the module on a
dozen tokens and compares the logits with those of transformers' eager attention. ``load`` has the
steps of a load in their order. ``reference`` is the attention that runs on any device. ``sampler``
is a pure function of logits, parameters, seed and position.

This room knows no requests: a batch is rows. It declares what can be replaced, and names neither
``kernels`` nor ``quantization`` nor ``adapters``.
"""
