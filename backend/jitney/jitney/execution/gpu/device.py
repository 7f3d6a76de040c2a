"""What the GPU's runner asks of its device beside kernels: pinned memory, events, graphs.

:class:`CudaDevice` is the real one. :class:`HostDevice` stands in where the kernels are interpreted
on a CPU: everything is over when a call returns, and there are no graphs. So the runner has one
code for both.
"""

import contextlib
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor


class CaptureError(Exception):
    """Work that runs cannot be captured: it waits for the device, say."""


class Event(Protocol):
    """A point in the device's work."""

    def record(self) -> None:
        """Set the point: after everything that was launched so far."""

    def synchronize(self) -> None:
        """Wait until the device has passed the point; at once if it was never set."""


class Replay(Protocol):
    """Captured work."""

    def replay(self) -> None:
        """Launch it once more, on the same memory."""


class Device(Protocol):
    """What :class:`CudaDevice` and :class:`HostDevice` have in common."""

    torch_device: torch.device
    can_capture: bool

    def enter(self) -> None:
        """Make it the device of the calling thread."""

    def staging(self, count: int) -> Tensor:
        """Host memory of int32 [count] that copies to the device can be made from."""

    def event(self) -> Event:
        """A new event, not set."""

    def capture(self, run: Callable[[], None]) -> Replay:
        """Run it once, then capture what it launches. Raises CaptureError, or whatever the first
        run raises."""

    def synchronize(self) -> None:
        """Wait for everything that was launched."""

    def release(self) -> None:
        """Give memory that nothing uses back to the device."""


class CudaDevice:
    """A GPU, by torch. All work is launched on the calling thread's current stream."""

    can_capture = True

    def __init__(self, device: torch.device) -> None:
        self.torch_device = device
        self._pool: Any = None  # of all graphs: they run one after the other, so they may share
        self._side: torch.cuda.Stream | None = None

    def enter(self) -> None:
        """See :class:`Device`."""
        torch.cuda.set_device(self.torch_device)

    def staging(self, count: int) -> Tensor:
        """Pinned, so that the copy from it is asynchronous."""
        return torch.empty(count, dtype=torch.int32, pin_memory=True)

    def event(self) -> Event:
        """See :class:`Device`."""
        return torch.cuda.Event()

    def capture(self, run: Callable[[], None]) -> Replay:
        """Run it once on a side stream, so that kernels are compiled and libraries have allocated
        what they keep, then capture it there. Threads other than this one may go on meanwhile."""
        if self._side is None:
            self._side = torch.cuda.Stream(self.torch_device)
            self._pool = torch.cuda.graph_pool_handle()
        current = torch.cuda.current_stream(self.torch_device)
        self._side.wait_stream(current)
        with torch.cuda.stream(self._side):
            run()
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
                run()
        except Exception as error:
            # The end of a spoilt capture raises too, and says only that it was spoilt: not by what.
            cause = error.__context__ or error
            # Nor does it tell the allocator, in some versions of torch, which then gives no cached
            # memory back however short it is.
            with contextlib.suppress(Exception):  # it was told
                torch._C._cuda_endAllocateToPool(self.torch_device.index, self._pool)
            raise CaptureError(*str(cause).splitlines()[:1]) from cause
        finally:
            # And then leaves the thread on the side stream, unordered with what was launched here.
            torch.cuda.set_stream(current)
        return graph

    def synchronize(self) -> None:
        """See :class:`Device`."""
        torch.cuda.synchronize(self.torch_device)

    def release(self) -> None:
        """See :class:`Device`. The graphs must be gone."""
        self._pool = None
        torch.cuda.empty_cache()


class _Passed:
    """An event on a device where nothing is ever under way."""

    def record(self) -> None:
        """Nothing to set."""

    def synchronize(self) -> None:
        """Nothing to wait for."""


class HostDevice:
    """A CPU on which the kernels are interpreted."""

    torch_device = torch.device("cpu")
    can_capture = False

    def enter(self) -> None:
        """There is one only."""

    def staging(self, count: int) -> Tensor:
        """Plain memory."""
        return torch.empty(count, dtype=torch.int32)

    def event(self) -> Event:
        """One that has always passed."""
        return _Passed()

    def capture(self, run: Callable[[], None]) -> Replay:
        """Never called, as ``can_capture`` says."""
        raise CaptureError("a CPU has no graphs")

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def release(self) -> None:
        """Nothing to give back."""
