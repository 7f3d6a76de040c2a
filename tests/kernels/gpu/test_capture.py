"""A capture that fails, as torch's own machinery goes about it: without a GPU, by stand-ins."""

from contextlib import contextmanager

import pytest
import torch
from jitney.kernels.gpu.graphs import CaptureError, CudaCapture


class Stream:
    def __init__(self, *_: object) -> None:
        pass

    def wait_stream(self, other: "Stream") -> None:
        pass


class Graph:
    def replay(self) -> None:
        pass


class Cuda:
    """The calling thread's stream, and captures that a wait for the device spoils."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.main = self.current = Stream()
        self.capturing = False
        for name, value in {
            "Stream": Stream,
            "CUDAGraph": Graph,
            "graph_pool_handle": object,
            "current_stream": lambda device: self.current,
            "set_stream": self.set_stream,
            "stream": self.stream,
            "graph": self.graph,
        }.items():
            patch.setattr(torch.cuda, name, value)
        self.ended: list[int] = []
        patch.setattr(
            torch._C, "_cuda_endAllocateToPool", lambda index, pool: self.ended.append(index),
            raising=False,
        )  # fmt: skip

    def set_stream(self, stream: Stream) -> None:
        self.current = stream

    @contextmanager
    def stream(self, stream: Stream):
        before, self.current = self.current, stream
        yield
        self.current = before

    @contextmanager
    def graph(self, graph: object, pool: object, stream: Stream, capture_error_mode: str):
        self.states_made_in_inference_mode = torch.is_inference_mode_enabled()
        before, self.current = self.current, stream
        self.capturing = True
        spoilt = False
        try:
            yield
        except RuntimeError:
            spoilt = True
            raise
        finally:
            self.capturing = False
            if spoilt:  # the end of the capture raises before the stream is left
                raise RuntimeError("operation failed due to a previous error during capture")
            self.current = before

    def wait_for_device(self) -> None:
        if self.capturing:
            raise RuntimeError("operation not permitted when stream is capturing\nmore of it")


def test_a_failed_capture_leaves_the_thread_on_its_stream(monkeypatch) -> None:
    cuda = Cuda(monkeypatch)
    capture = CudaCapture(torch.device("cuda", 0))
    with pytest.raises(CaptureError, match=r"^operation not permitted when stream is capturing$"):
        capture(cuda.wait_for_device)
    assert cuda.current is cuda.main
    assert cuda.ended == [0]
    capture(lambda: None)
    assert cuda.current is cuda.main


def test_a_capture_begins_outside_of_inference_mode_and_runs_in_it(monkeypatch) -> None:
    cuda = Cuda(monkeypatch)
    modes: list[bool] = []
    with torch.inference_mode():
        CudaCapture(torch.device("cuda", 0))(
            lambda: modes.append(torch.is_inference_mode_enabled())
        )
    assert modes == [True, True]
    assert not cuda.states_made_in_inference_mode


def test_what_the_run_before_a_capture_raises_is_no_failure_of_the_capture(monkeypatch) -> None:
    cuda = Cuda(monkeypatch)

    def run() -> None:
        raise torch.OutOfMemoryError("no memory")

    with pytest.raises(torch.OutOfMemoryError):
        CudaCapture(torch.device("cuda", 0))(run)
    assert not cuda.capturing
