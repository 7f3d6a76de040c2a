"""What a step needs on a GPU alone: kernels, buffers, graphs. Imported only when it is chosen.

- ``gpu_attention`` plans and launches kernels: ``write_kernel`` rotates Q and K and writes K and V
  to the cache, ``attention_kernels`` attends, tile by tile (``attention_tile``); ``tiles`` has the
  sizes of tiles, ``language`` what kernels share. One launch serves decodes and chunks of prompts.
  Where a step has few decodes of long contexts, these are cut into parts, which a second kernel
  joins.
- ``gpu_layers`` computes the parts of fused layers (``kernels.fused``), with ``norm_kernels`` for
  what is between two products. ``adapter_products`` adds what LoRA adapters give. With option
  ``batch_invariant``, ``invariant_product`` multiplies in place of torch. ``gpu_fuse`` rearranges a
  loaded model so.
- ``graphs`` replays decode steps as CUDA graphs, one for each padded number of rows. Their
  attention is planned for the longest context that the model can have.
- ``measure`` runs the largest steps once at load, and so finds what is left for the cache.
  ``kv_scales`` finds the scales of a float8 cache.
- ``gpu_accelerator`` offers them to a load.
"""
