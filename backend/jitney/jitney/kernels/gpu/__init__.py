"""What a step needs on a GPU alone: kernels, buffers, graphs. Imported only when it is chosen.

- ``gpu_attention`` plans and launches. ``write_kernel`` puts K and V into the cache,
  ``attention_kernels`` attends, ``tiles`` has the tile sizes. One launch serves decodes and chunks
  of prompts. A few long contexts are cut into parts, which a second kernel joins.
- ``graphs`` replays decode steps as CUDA graphs, one for each padded number of rows. Their
  attention is planned for the longest context that the model can have.
- ``measure`` runs the largest steps once at load, and so finds what is left for the cache.
  ``kv_scales`` finds the scales of a float8 cache.
- ``gpu_accelerator`` offers them to a load.
"""
