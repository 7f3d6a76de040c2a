"""Capturing work of a GPU as a CUDA graph, by torch."""

import contextlib
from collections.abc import Callable
from typing import Any

import torch

Work = Callable[[], None]
"""Launches kernels, on the same memory in every call."""
Capture = Callable[[Work], Work]
"""Runs work once, then captures what it launches; returns what launches that again. Raises
CaptureError, or whatever the first run raises."""


class CaptureError(Exception):
    """Work that runs cannot be captured: it waits for the device, say."""


def capture_on(device: torch.device) -> Capture | None:
    """What captures work on a device; None on a CPU, which has no graphs."""
    return CudaCapture(device) if device.type == "cuda" else None


class CudaCapture:
    """A :data:`Capture`. All graphs share memory: they run one after the other."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = None
        self._side: torch.cuda.Stream | None = None

    def __call__(self, work: Work) -> Work:
        """Run it once on a side stream, so that kernels are compiled and libraries have allocated
        what they keep, then capture it there. Threads other than this one may go on meanwhile."""
        if self._side is None:
            self._side = torch.cuda.Stream(self._device)
            self._pool = torch.cuda.graph_pool_handle()
        current = torch.cuda.current_stream(self._device)
        self._side.wait_stream(current)
        with torch.cuda.stream(self._side):
            work()
        current.wait_stream(self._side)
        graph = torch.cuda.CUDAGraph()
        try:
            # torch makes the random numbers' state of all graphs of the process with the first one:
            # made in inference mode, it would keep anybody else from capturing outside of it.
            with (
                torch.inference_mode(False),
                torch.cuda.graph(
                    graph, pool=self._pool, stream=self._side, capture_error_mode="thread_local"
                ),
                torch.inference_mode(),
            ):
                work()
        except Exception as error:
            # The end of a spoilt capture raises too, and says only that it was spoilt: not by what.
            cause = error.__context__ or error
            # Nor does it tell the allocator, in some versions of torch, which then gives no cached
            # memory back however short it is.
            with contextlib.suppress(Exception):  # it was told
                torch._C._cuda_endAllocateToPool(self._device.index, self._pool)
            raise CaptureError(*str(cause).splitlines()[:1]) from cause
        finally:
            # And then leaves the thread on the side stream, unordered with what was launched here.
            torch.cuda.set_stream(current)
        return graph.replay
