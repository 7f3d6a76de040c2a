"""Fused modules: they replace modules of a loaded model, compute the same, and are faster.

Everything here happens once, at load. ``fuse`` looks for modules to replace, in four steps:

1. **Recognise** (``recognise``). A module is a candidate if its children have known names and are
   of known kinds. Whole decoder layers are looked for first, then gated MLPs, then RMS norms. The
   name of the model plays no part.
2. **Build** (``forms``, ``layers``). What the candidate computes is written down as forms. The
   device's ``LayerKernels`` make functions of these, and a fused module is built of the functions.
3. **Prove** (``trial``). The candidate and the fused module run on the same random input, for
   tokens at the first positions and at the last. Their results must be equal but for rounding, and
   so must the query, key and value that they hand to attention.
4. **Replace.** If the proof holds, the fused module takes the candidate's place, and the candidate
   is freed. If any step fails, the candidate stays as it was, and the log says why (``Misfit``).

If all layers of a causal model were replaced, the model's forward pass is replaced and proved in
the same way (``whole_model``).

An example, the MLP of a layer of Llama::

    down_proj(act_fn(gate_proj(x)) * up_proj(x))

- Recognised: its children are ``gate_proj``, ``up_proj`` and ``down_proj``, which are linear
  layers, and ``act_fn``. Run on 97 numbers, ``act_fn`` gives what SiLU gives.
- Built: one product gives gate and up, and computes SiLU and the multiplication before it stores
  its result. A second product is ``down_proj``. In bfloat16 these are two kernels, not five. (On a
  GPU they are three: SiLU and the multiplication have one of their own.)
- Proved: on 7 random tokens, and on the same times 256, the results differ by less than 1e-4 of
  their norm (2e-2 in bfloat16). An MLP that clamps gate to 30 would look the same on small input;
  times 256 it differs.
- Replaced: ``layer.mlp`` is a ``FusedMLP``. Of an MLP that clamps, the log says "not replaced (1):
  gated MLP: its result differs".

The other modules: ``rotary`` has cos and sin by position, ``adapted`` runs a model with LoRA
adapters that is fused as a whole or in parts, ``invariant`` checks the option ``batch_invariant``,
and ``rotary_lookup`` serves it in models that are not fused as a whole.

The kernels of a CPU are in ``kernels.cpu.layer_kernels``, those of a GPU in
``kernels.gpu.gpu_layers``.
"""
