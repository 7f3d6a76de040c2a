"""LoRA adapters: read from PEFT's files, and kept in memory while requests use them.

The way of a request that names an adapter:

1. In front, ``text/intake.py`` checks that the folder of ``lora_name`` is there.
2. In the engine, the request waits (``engine/pending.py``) until its adapter is in memory. ``pool``
   keeps a bounded set of adapters, by their names and the state of their files.
3. A thread reads the files of an adapter that is not in memory (``peft_files`` and
   ``peft_config``). The runner makes a ``LowRank`` of what was read.
4. The request's rows carry that ``LowRank`` in every step.

The tokens of a step that have adapters form spans, each of one adapter. For each span, the
adapter's own product is added to the results of the linear layers that it changes. Who adds it
depends on how the step is computed:

- by transformers' modules: hooks on the linear layers;
- by fused modules: ``kernels/fused/adapted.py``, after each of their products;
- by one native call: two kernels compute ``x A^T B^T`` into a buffer before a layer's product, and
  the product's kernel adds the buffer.

A step without spans is computed as if there were no adapters.
"""
