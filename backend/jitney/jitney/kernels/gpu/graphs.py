"""Decode steps as CUDA graphs: their many small kernels become one launch.

A graph launches the very kernels that were captured, over the same memory, with the sizes they had.
Of these only the number of rows differs between decode steps, so a step is padded to one of a few
numbers. Attention is planned for the longest context there can be, which is right for every shorter
one. Made by ``gpu_accelerator``; called by the runner.
"""

import contextlib
import dataclasses
import logging
import time
from bisect import bisect_left
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from jitney.config import EngineConfig
from jitney.execution.attention import AttentionMetadata
from jitney.execution.machine import enter_device, synchronize
from jitney.execution.runner import Forward
from jitney.messages import ModelInfo

_log = logging.getLogger(__name__)

_MOST_ROWS = 512
"""Larger decode steps keep the device busy for longer than launching their kernels takes."""

Launch = Callable[[], None]
"""Launches kernels, on the same memory in every call."""
Capture = Callable[[Launch], Launch]
"""Runs a launch once, then captures what it launches; returns what launches that again. Raises
CaptureError, or whatever the first run raises."""


class CaptureError(Exception):
    """A launch that runs cannot be captured: it waits for the device, say."""


def capture_on(device: torch.device) -> Capture | None:
    """What captures on a device; None on a CPU, which has no graphs."""
    return CudaCapture(device) if device.type == "cuda" else None


class CudaCapture:
    """A :data:`Capture`. All graphs share memory: they run one after the other."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = None
        self._side: torch.cuda.Stream | None = None

    def __call__(self, launch: Launch) -> Launch:
        """Run it once on a side stream, so that kernels are compiled and libraries have allocated
        what they keep, then capture it there. Threads other than this one may go on meanwhile."""
        if self._side is None:
            self._side = torch.cuda.Stream(self._device)
            self._pool = torch.cuda.graph_pool_handle()
        current = torch.cuda.current_stream(self._device)
        self._side.wait_stream(current)
        with torch.cuda.stream(self._side):
            launch()
        current.wait_stream(self._side)

        graph = torch.cuda.CUDAGraph()
        try:
            self._capture_into(graph, launch)
        except Exception as error:
            # The end of a spoilt capture raises too, and says only that it was spoilt: not by what.
            cause = error.__context__ or error
            self._end_allocations()
            raise CaptureError(*str(cause).splitlines()[:1]) from cause
        finally:
            # A spoilt capture leaves the thread on the side stream, unordered with what was
            # launched here.
            torch.cuda.set_stream(current)
        return graph.replay

    def _capture_into(self, graph: torch.cuda.CUDAGraph, launch: Launch) -> None:
        # torch makes the random state of all graphs of the process with the first one. Made in
        # inference mode, it would keep anybody else from capturing outside of it.
        with (
            torch.inference_mode(False),
            torch.cuda.graph(
                graph, pool=self._pool, stream=self._side, capture_error_mode="thread_local"
            ),
            torch.inference_mode(),
        ):
            launch()

    def _end_allocations(self) -> None:
        """Tell the allocator that a spoilt capture is over.

        Some versions of torch do not do so, and then never give cached memory back, not even when
        memory runs out. Others do, and raise here.
        """
        with contextlib.suppress(Exception):
            torch._C._cuda_endAllocateToPool(self._device.index, self._pool)


def padded_sizes(config: EngineConfig, info: ModelInfo) -> list[int]:
    """Numbers of rows that decode steps are padded to, ascending.

    Those of option ``cuda_graph_sizes``, or else 1, 2, 4, 8, the multiples of 16, and at last the
    most rows that a step can have, at most _MOST_ROWS. Empty without graphs.
    """
    if config.cuda_graphs == "never":
        return []
    rows = min(config.max_num_seqs, info.max_num_batched_tokens)
    chosen = config.cuda_graph_sizes
    if chosen is None:
        most = min(rows, _MOST_ROWS)
        chosen = (1, 2, 4, 8, *range(16, most, 16), most)
    return sorted({size for size in chosen if size <= rows})


class DecodeGraphs:
    """A ``runner.Forward``: decode steps by graphs, captured at first use, others kernel by kernel.

    Owns the graphs and the buffers that they read and write. A decode step is copied into the
    beginning of these. The rows behind it are padding, which sees nothing and is written nowhere.
    """

    def __init__(
        self,
        forward: Forward,
        sizes: list[int],
        capture: Capture,
        info: ModelInfo,
        device: torch.device,
    ) -> None:
        """``forward`` launches a step's kernels one by one; ``sizes`` are :func:`padded_sizes`."""
        self.graphs: dict[int, Launch] = {}
        """By number of rows."""
        self._forward = forward
        self._sizes = sizes
        self._capture = capture
        self._device = device

        rows = max(sizes, default=0)
        columns = -(-info.max_model_len // info.block_size)
        # The buffers: a step of the most rows, all of them padding. A graph of fewer rows reads the
        # beginning of each.
        self._ids = torch.zeros(rows, dtype=torch.int64, device=device)
        self._indices = torch.arange(rows, device=device)
        self._meta = AttentionMetadata(
            query_start=torch.arange(rows + 1, dtype=torch.int32, device=device),
            context_len=torch.zeros(rows, dtype=torch.int32, device=device),
            block_table=torch.zeros((rows, columns), dtype=torch.int32, device=device),
            last_block=info.num_blocks - 1,
            slot_mapping=torch.full_like(self._ids, -1),
            positions=torch.zeros_like(self._ids),
            block_size=info.block_size,
            max_query_len=1,
            max_context_len=info.max_model_len,
        )
        self._logits: Tensor | None = None
        """[most rows, vocabulary], from the first capture on."""

    def __call__(self, ids: Tensor, meta: AttentionMetadata, indices: Tensor) -> Tensor:
        """Logits of a step."""
        rows = len(ids)
        if self._has_graph_for(rows, meta, indices):
            self._load(ids, meta)
            size = self._sizes[bisect_left(self._sizes, rows)]
            if self._run(size):
                assert self._logits is not None
                return self._logits[:rows]
        return self._forward(ids, meta, indices)

    def _has_graph_for(self, rows: int, meta: AttentionMetadata, indices: Tensor) -> bool:
        """Whether all rows are decodes without adapters, and not too many."""
        if meta.max_query_len > 1 or meta.adapted or len(indices) != rows:
            return False
        return rows <= max(self._sizes, default=0)

    def capture_all(self) -> None:
        """Capture every graph that steps may need. The buffers hold a step of padding."""
        begin = time.monotonic()
        enter_device(self._device)
        with torch.inference_mode():
            for size in reversed(self._sizes):  # the others fit into what the largest allocates
                if not self._run(size):
                    break
            synchronize(self._device)
        took = time.monotonic() - begin
        _log.info("captured %d decode steps as CUDA graphs in %.1f s", len(self.graphs), took)

    def _load(self, ids: Tensor, meta: AttentionMetadata) -> None:
        """Copy a step into the buffers, in stream order."""
        buffers = self._meta
        rows, columns = meta.block_table.shape
        # The rows behind the step's are padding: no context, and no slot to write to.
        buffers.context_len.zero_()
        buffers.slot_mapping.fill_(-1)
        self._ids[:rows].copy_(ids)
        buffers.positions[:rows].copy_(meta.positions)
        buffers.slot_mapping[:rows].copy_(meta.slot_mapping)
        buffers.context_len[:rows].copy_(meta.context_len)
        buffers.block_table[:rows, :columns].copy_(meta.block_table)

    def _run(self, size: int) -> bool:
        """Replay the graph of ``size`` rows, captured first if it is not yet. False, and no graphs
        from then on, if a module cannot be captured: one that waits for the device, say."""
        if size not in self.graphs:
            begin = time.monotonic()
            try:
                self.graphs[size] = self._capture(partial(self._decode, size))
            except CaptureError as error:
                self._sizes = []
                _log.warning("decode steps run without CUDA graphs: %s", error)
                return False
            took = time.monotonic() - begin
            _log.debug("captured a decode step of %d rows in %.2f s", size, took)
        self.graphs[size]()
        return True

    def _decode(self, size: int) -> None:
        """What a graph consists of: from the buffers to ``_logits``."""
        buffers = self._meta
        meta = dataclasses.replace(
            buffers,
            query_start=buffers.query_start[: size + 1],
            context_len=buffers.context_len[:size],
            block_table=buffers.block_table[:size],
            slot_mapping=buffers.slot_mapping[:size],
            positions=buffers.positions[:size],
            plans={},
        )
        logits = self._forward(self._ids[:size], meta, self._indices[:size])
        if self._logits is None:  # in the run before the first capture
            self._logits = logits.new_empty((len(self._ids), logits.shape[1]))
        # Graphs share the memory of what they compute: this is the one thing that outlives them.
        self._logits[:size].copy_(logits)
