"""Decode steps as CUDA graphs: their many small kernels become one launch.

A graph launches the very kernels that were captured, over the same memory, with the sizes that they
had then. Decode steps differ in two sizes. The number of rows is padded to one of a few numbers,
with a graph for each. The contexts do not matter: attention is planned for the longest one there
can be, and that plan is right for every shorter one.

Made by ``gpu_accelerator``; called by the runner.
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
from jitney.execution.runner import RunTokens
from jitney.messages import ModelInfo

_log = logging.getLogger(__name__)

_MOST_ROWS = 512
"""By default no graph has more rows. A larger decode step keeps the device busy for longer than the
host takes to launch its kernels one by one, so a graph would save no time."""

Launch = Callable[[], None]
"""Launches some kernels. They read and write the same memory in every call."""
Capture = Callable[[Launch], Launch]
"""Calls its argument twice: once to run the kernels, once to capture them. Returns a function that
launches the captured kernels. Raises CaptureError, or whatever the first call raises."""


class CaptureError(Exception):
    """What runs cannot be captured: it waits for the device, say."""


def capture_on(device: torch.device) -> Capture | None:
    """What captures on a device; None on a CPU, which has no graphs."""
    return CudaCapture(device) if device.type == "cuda" else None


class CudaCapture:
    """A :data:`Capture` by CUDA. All graphs share memory: they run one after the other."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # The graphs' memory, and the stream that they are captured on: made with the first one.
        self._pool: Any = None
        self._side: torch.cuda.Stream | None = None

    def __call__(self, launch: Launch) -> Launch:
        """Run it once on a side stream, then capture it there. Other threads may go on meanwhile.

        In the first run kernels are compiled and libraries allocate what they keep, which cannot
        be captured.
        """
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
            # If ``launch`` raises, the end of the capture raises a second error, which only says
            # that the capture failed. The first error says why: it is the context of the second.
            cause = error.__context__ or error
            first_line = str(cause).partition("\n")[0]
            self._end_allocations()
            raise CaptureError(first_line) from cause
        finally:
            # A capture that fails leaves this thread on the side stream, where nothing waits for
            # what was launched on the current one.
            torch.cuda.set_stream(current)
        return graph.replay

    def _capture_into(self, graph: torch.cuda.CUDAGraph, launch: Launch) -> None:
        """Record into ``graph`` what ``launch`` launches."""
        capturing = torch.cuda.graph(
            graph, pool=self._pool, stream=self._side, capture_error_mode="thread_local"
        )
        # With the first graph of the process torch makes a random state, a tensor, for all graphs.
        # A tensor made in inference mode cannot be changed outside of it, so no later capture
        # outside inference mode would work. So inference mode is off while a capture begins and
        # ends, and on within.
        with torch.inference_mode(False), capturing, torch.inference_mode():
            launch()

    def _end_allocations(self) -> None:
        """Tell the allocator that a failed capture is over.

        Some versions of torch do not tell it, and then never give cached memory back, not even when
        memory runs out. Other versions do, and with these the call raises.
        """
        with contextlib.suppress(Exception):
            torch._C._cuda_endAllocateToPool(self._device.index, self._pool)


def padded_sizes(config: EngineConfig, info: ModelInfo) -> list[int]:
    """Numbers of rows that decode steps are padded to, ascending.

    Those of option ``cuda_graph_sizes``, or else 1, 2, 4, 8, the multiples of 16, and at last the
    most rows that a step can have, but not more than _MOST_ROWS. Empty without graphs.
    """
    if config.cuda_graphs == "never":
        return []
    most = min(config.max_num_seqs, info.max_num_batched_tokens)
    chosen = config.cuda_graph_sizes
    if chosen is None:
        largest = min(most, _MOST_ROWS)
        chosen = (1, 2, 4, 8, *range(16, largest, 16), largest)
    return sorted({size for size in chosen if size <= most})


class DecodeGraphs:
    """A ``runner.RunTokens``: decode steps by graphs, captured at first use, others kernel by
    kernel.

    Owns the graphs and the buffers that they read and write. Here a step of 3 rows runs by the
    graph of 4 rows, where buffers have 8::

        buffers       row 0   row 1   row 2   row 3     row 4 ... row 7
                      the step's rows         padding   (not read by this graph)

    A row of padding has no context, so attention gives zeros for it, and its slot is -1, so its K
    and V are not written.
    """

    def __init__(
        self,
        forward: RunTokens,
        sizes: list[int],
        capture: Capture,
        info: ModelInfo,
        device: torch.device,
    ) -> None:
        """``forward`` launches a step's kernels one by one; ``sizes`` are :func:`padded_sizes`."""
        self.graphs: dict[int, Launch] = {}
        """By padded number of rows; each launches the kernels of such a step."""
        self._forward = forward
        self._sizes = sizes
        self._capture = capture
        self._device = device

        # The buffers. As yet they hold a step of padding. A graph of fewer rows reads the beginning
        # of each.
        rows = max(sizes, default=0)
        columns = -(-info.max_model_len // info.block_size)
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
        """The result of all graphs, [most rows, vocabulary]; made with the first of them."""

    def __call__(self, ids: Tensor, meta: AttentionMetadata, indices: Tensor) -> Tensor:
        """Logits of a step."""
        rows = len(ids)
        if self._can_pad(rows, meta, indices):
            self._load(ids, meta)
            # The least size that is not below ``rows``.
            size = self._sizes[bisect_left(self._sizes, rows)]
            if self._run(size):
                assert self._logits is not None
                return self._logits[:rows]
        return self._forward(ids, meta, indices)

    def _can_pad(self, rows: int, meta: AttentionMetadata, indices: Tensor) -> bool:
        """Whether the step can run by a graph: its rows are decodes, and not too many."""
        if meta.max_query_len > 1:
            return False
        # Which tokens are under which adapter differs from step to step.
        if meta.adapted:
            return False
        # A graph computes the logits of every row.
        if len(indices) != rows:
            return False
        return rows <= max(self._sizes, default=0)

    def capture_all(self) -> None:
        """Capture every graph that steps may need, over buffers that hold a step of padding."""
        begin = time.monotonic()
        enter_device(self._device)
        with torch.inference_mode():
            # The largest first: the others fit into the memory that it allocates.
            for size in reversed(self._sizes):
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
        """Replay the graph of ``size`` rows. If there is none yet, it is captured before.

        Returns False if the model cannot be captured. From then on no step runs by a graph.
        """
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
            # A dictionary of its own. In that of the buffers, which graphs of all sizes share,
            # attention would find what it derived from a step of another size.
            plans={},
        )
        logits = self._forward(self._ids[:size], meta, self._indices[:size])
        # This happens in the run before the first capture. What is allocated during a capture would
        # belong to the graphs' memory, which they overwrite.
        if self._logits is None:
            self._logits = logits.new_empty((len(self._ids), logits.shape[1]))
        # Graphs share the memory of what they compute, so the next one overwrites ``logits``.
        self._logits[:size].copy_(logits)
