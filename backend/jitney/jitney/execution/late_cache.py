"""A cache of transformers that says it holds tokens which nobody computed. Used by the proof at
load (``probe``) alone.
"""

from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, DynamicLayer


class _LateLayer(DynamicLayer):
    """Stands behind ``start`` tokens, whose keys and values it does not have. So a mask begins at
    the first token that it has, as it does for a sliding window."""

    def __init__(self, start: int) -> None:
        super().__init__()
        self._start = start

    def get_seq_length(self) -> int:
        return self._start + super().get_seq_length()

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        held = super().get_seq_length()
        return held + query_length, self._start


def make_late_cache(config: PreTrainedConfig, start: int) -> Cache:
    """An empty cache of a sequence that has ``start`` tokens already."""
    return Cache(layers=[_LateLayer(start) for _ in range(config.num_hidden_layers)])
