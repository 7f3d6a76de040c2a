"""The runner of GPUs: a ``TorchRunner`` whose decode steps run as CUDA graphs where they can be
captured; steps with prompts run kernel by kernel.

It runs as well on a CPU where the kernels are interpreted, without graphs: that is how it is tested
without a GPU.
"""

import contextlib
import logging
import time
from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from jitney.config import EngineConfig
from jitney.execution.attention import AttentionMetadata
from jitney.execution.interface import LayerCache, LoadedModel
from jitney.execution.machine import enter_device, synchronize
from jitney.execution.runner import PendingStep, TorchRunner
from jitney.kernels.gpu.capture import Capture
from jitney.kernels.gpu.graphs import DecodeGraphs, GraphKey, padded_sizes
from jitney.kernels.gpu.inputs import DecodeInputs
from jitney.messages import Batch, ModelInfo, StepOutput

_log = logging.getLogger(__name__)


class GpuRunner:
    """Owns the graphs and what they read and write. Not thread-safe: one thread calls it."""

    info: ModelInfo

    def __init__(
        self,
        model: LoadedModel,
        caches: list[LayerCache],
        info: ModelInfo,
        config: EngineConfig,
        capture: Capture | None,
    ) -> None:
        """Without ``capture`` there are no graphs."""
        self.info = info
        self._device = model.device
        self._runner = TorchRunner(model, caches, info, forward=self._forward)
        self._attends: list[Any] = list(dict.fromkeys(each.attend for each in caches))
        self._capture_at_load = config.cuda_graphs == "load"
        sizes: list[int] = []
        if capture is not None and config.cuda_graphs != "never":
            most = min(config.max_num_seqs, info.max_num_batched_tokens)
            sizes = padded_sizes(config.cuda_graph_sizes, most)
        self._graphs = DecodeGraphs(capture, sizes, info.max_model_len, self._plan)
        self._inputs = DecodeInputs(
            model.device,
            max_rows=max(sizes, default=0),
            max_context=info.max_model_len,
            block_size=info.block_size,
            last_block=info.num_blocks - 1,
        )
        self._logits: Tensor | None = None  # of graphs: [most rows of a graph, vocabulary]

    def execute(self, batch: Batch) -> StepOutput:
        """See :class:`TorchRunner`."""
        return self._runner.execute(batch)

    def launch(self, batch: Batch) -> PendingStep:
        """See :class:`TorchRunner`."""
        return self._runner.launch(batch)

    def warm_up(self, batches: Sequence[Batch]) -> None:
        """Run first steps, and capture all graphs if they are to be there from the start."""
        self._runner.warm_up(batches)
        if self._capture_at_load:
            self._capture_graphs()

    def close(self) -> None:
        """Give the memory of module, cache and graphs back. The runner is of no use afterwards."""
        with contextlib.suppress(Exception):  # after a fault of the device, say
            synchronize(self._device)
        self._graphs.clear()
        self._attends = []
        self._logits = None
        del self._inputs
        self._runner.close()

    @property
    def graph_keys(self) -> list[GraphKey]:
        """All graphs that steps may need."""
        return self._graphs.keys()

    def _capture_graphs(self) -> None:
        """Capture all graphs that steps may need. What the buffers hold meanwhile is a step that
        reads and writes nothing."""
        begin = time.monotonic()
        enter_device(self._device)
        with torch.inference_mode():
            self._inputs.clear()
            for key in self.graph_keys:
                if not self._graphs.usable:  # the first could not be captured
                    break
                self._graphs.run(key, key.limit, self._decode)
            synchronize(self._device)
        took = time.monotonic() - begin
        _log.info("captured %d decode steps as CUDA graphs in %.1f s", len(self._graphs), took)

    def _forward(self, ids: Tensor, meta: AttentionMetadata, indices: Tensor) -> Tensor:
        """A ``runner.Forward``: by a graph, if the step is one of decodes that has one."""
        if meta.max_query_len == 1 and len(indices) == len(ids):
            key = self._graphs.key(len(ids), meta.max_context_len)
            if key is not None:
                self._inputs.load(ids, meta)
                self._graphs.run(key, meta.max_context_len, self._decode)
                assert self._logits is not None
                return self._logits[: len(ids)]
        return self._runner.forward(ids, meta, indices)

    def _decode(self, key: GraphKey) -> None:
        """What a graph of this key consists of. Reads the static buffers, writes ``_logits``."""
        inputs = self._inputs
        meta = inputs.metadata(key.rows, key.limit)
        logits = self._runner.forward(inputs.ids[: key.rows], meta, inputs.rows[: key.rows])
        if self._logits is None:  # in the run before the first capture
            self._logits = logits.new_empty((len(inputs.rows), logits.shape[1]))
        # Graphs share the memory of what they compute: this is the one thing that outlives them.
        self._logits[: key.rows].copy_(logits)

    def _plan(self, rows: int, longest_context: int) -> Hashable:
        """What the layers' attention bakes into the launches of a decode step."""
        return tuple(attend.plan(rows, rows, 1, longest_context) for attend in self._attends)
