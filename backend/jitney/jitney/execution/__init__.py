"""The model in plain torch: loading and checking, a step's inputs, attention, sampling.

A checkpoint is loaded with transformers' own modules, and attention is replaced through
transformers' ``AttentionInterface``: our function gets q, k and v after rotary embedding. As the
keyword argument ``paged`` it gets a callable that has the step's metadata and caches. All rows of a
step are flattened to [1, tokens] with their own positions; there is no mask.

A model that cannot run this way is refused at load, by name and reason. ``checkpoint`` judges files
(``gguf_file`` those of GGUF), and ``support`` judges configurations. ``probe`` makes a trial run of
the module, called the proof: it computes a dozen tokens and compares their logits with those of
transformers' eager attention.

A load, in the order to read: ``load`` (its docstring lists all steps), ``read_model`` with
``weights`` (the steps from the files to the proof), ``first_steps`` (which warms up the kernels).
``machine``, ``options`` and ``memory`` say what the device has and how it is shared. ``weigh`` adds
up what a load would take.

A step, in the order to read: ``protocols`` (what the engine asks), ``runner``, ``row_samples``
(which tokens of a row need logits), ``attention`` (what attention must know of the step),
``interface`` (how it gets there), ``reference`` (attention that runs on any device), ``byte_cache``
(constants of an int8 cache), ``sampler`` (a pure function of logits, parameters, seed and position)
with ``logits_processors``, ``filters`` and ``philox``. Beside it: ``low_rank`` (adapters),
``quantized`` (layers), ``draft``, ``draft_setup`` and ``eagle`` (models that propose tokens).

This room knows no requests: a batch is rows. It declares what can be replaced (``acceleration``),
and imports neither ``kernels`` nor ``quantization`` nor ``adapters``.
"""
