"""Logits to tokens on the device: what ``execution.sampler`` gives, without the host waiting.

Called by the GPU's runner once a step: :meth:`DeviceSampler.launch` queues the work, the token ids
stay on the device as the next step's inputs, and :meth:`LaunchedSamples.wait` brings them to the
host when they are wanted there.
"""

import torch
from torch import Tensor

from jitney.execution.sampler import Sampled, sample
from jitney.request import Row


class LaunchedSamples:
    """One step's samples, on their way."""

    def __init__(self, token_ids: Tensor, results: list[Sampled]) -> None:
        self.token_ids = token_ids
        """[S] int64 on the device. 0 for a sequence that drew nothing."""
        self._results = results

    def wait(self) -> list[Sampled]:
        """The samples, parallel to the pairs of the launch. Blocks until the device has them."""
        return self._results


class DeviceSampler:
    """Owns what sampling keeps between steps. One thread calls it; two steps may be in flight."""

    def __init__(self, device: torch.device, vocab_size: int) -> None:
        self._device = device
        self._vocab_size = vocab_size

    def launch(self, logits: Tensor, pairs: list[tuple[Row, int]]) -> LaunchedSamples:
        """Queue the draw of the next token of each pair (row, sequence index).

        ``logits`` [S, V], bf16, f16 or f32, is parallel to ``pairs`` and is left as it is; its rows
        may lie apart. All of it is read in stream order, so that it may be written again after
        this. The position of a new token is ``row.end``.
        """
        results = sample(logits, pairs)
        ids = [0 if each.error is not None else each.token_id for each in results]
        return LaunchedSamples(torch.tensor(ids, dtype=torch.int64, device=self._device), results)
