"""The model in plain torch: loading and checking, a step's inputs, attention, sampling.

A checkpoint is loaded with transformers' own modules, and attention is replaced through
transformers' ``AttentionInterface``: our function gets q, k and v after rotary embedding. As the
keyword argument ``paged`` it gets a callable that has the step's metadata and caches. All rows of a
step are flattened to [1, tokens] with their own positions; there is no mask.

What cannot run so is refused at load, by name and reason: ``checkpoint`` judges files
(``gguf_file`` those of GGUF), ``support`` judges configurations, and ``probe`` runs the module on a
dozen tokens and compares the logits with those of transformers' eager attention. ``load`` has the
steps of a load in their order; ``read_model`` and ``weights`` are the first of them, and ``weigh``
adds up what a load would take. ``machine``, ``options`` and ``memory`` say what the device has and
how it is shared.

A step, in the order to read: ``protocols`` (what the engine asks), ``runner``, ``attention`` (what
attention must know of the step), ``interface`` (how it gets there), ``reference`` (attention that
runs on any device), ``sampler`` (a pure function of logits, parameters, seed and position) with
``logits_processors``, ``filters`` and ``philox``. Beside it: ``low_rank`` (adapters), ``quantized``
(layers), ``draft`` and ``eagle`` (models that propose tokens).

This room knows no requests: a batch is rows. It declares what can be replaced (``acceleration``),
and imports neither ``kernels`` nor ``quantization`` nor ``adapters``.
"""
