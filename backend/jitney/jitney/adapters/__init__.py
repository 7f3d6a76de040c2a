"""LoRA adapters: read from PEFT's files, and kept in memory while requests use them.

In front, ``text/intake.py`` checks that the folder of ``lora_name`` is there. In the engine a
request whose adapter is not in memory waits (``engine/pending.py``), and a thread reads its files
(``peft_files``). ``pool`` keeps a bounded set, by the adapters' names and the state of their files.
The runner makes the loaded one, and the request's rows carry it.

A step's tokens are spans of one adapter each. What computes the model adds each span's product, of
its own rank: hooks on transformers' linear layers, or ``kernels/fused/adapted.py`` between fused
modules. Where a step is one native call, two kernels stand before each product: x times A, then
that times B. A step without spans takes the usual way.
"""
