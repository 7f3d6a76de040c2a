"""Forms of attention that the GPU's kernels are tested on, and what error each dtype may have."""

import torch

from tests.kernels.attention.paged import FLOAT8, Case, Spans

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 6e-3, torch.float16: 1e-3}
"""Of ‖out - expected‖ / ‖expected‖: bfloat16 and float16 round the weights, and the output."""

# As few KV heads as will do: each is a program of its own, which the interpreter runs in turn.
FORMS = [
    Case((2, 2), 64),
    Case((4, 1), 128, 64),
    Case((8, 1), 80),
    Case((7, 1), 96, 64),
    Case((4, 2), 256, 32),
    Case((4, 1), 64, 128, window=33),
    Case((8, 2), 80, window=7, sinks=True),
    Case((7, 1), 128, softcap=3.0),
    Case((8, 1), 96, sinks=True, softcap=20.0, window=100),
    Case((4, 2), 72, 24, window=1),
    Case((6, 2), 16, 1, sinks=True),
]
FLOAT8_FORMS = [
    Case((4, 2), 128, cache_dtype=FLOAT8, dtype=torch.bfloat16),
    Case((2, 2), 80, 64, cache_dtype=FLOAT8, dtype=torch.float16, window=40, sinks=True),
]

LENGTHS = [150, 66, 17, 1]
MIXED: list[Spans] = [
    [(0, 0, 64), (1, 0, 1)],
    [(1, 1, 3), (0, 64, 65), (2, 0, 16)],
    [(0, 65, 149), (1, 3, 66), (2, 16, 17), (3, 0, 1)],
    [(0, 149, 150)],
]
"""Chunks that begin and end beside borders of blocks and tiles, decodes among them."""
