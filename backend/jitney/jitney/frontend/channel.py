"""One request's responses: the server's response sender, closed exactly once.

Owned by the responder once the request is accepted. Only :meth:`Channel.is_cancelled` may be called
from another thread at the same time. A send is a round trip of 0.2 to 0.4 ms to the server,
whatever its size, and never waits for the client.

A send fails although the client is there if the server's shared memory is full. After a final
response the server takes nothing more, even if that response failed. So little data goes with the
final flag; larger data goes before it, in a response of its own. If that one fails, an error can
still be sent.

The final response makes the server delete the object that :meth:`Channel.is_cancelled` asks. To ask
it later, or at the same moment, crashes the whole server (2.51). Hence the lock: before the channel
sends the final response, it waits until no thread is asking, and marks itself closed.
"""

import logging
import queue
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from jitney.errors import CancelledError, InternalError, JitneyError

_LOG = logging.getLogger(__name__)

NamedArray = tuple[str, np.ndarray]

MAX_FINAL_BYTES = 4096
"""Data that goes with the final flag: about what the flag alone needs of shared memory."""


class Channel:
    """Sends responses; after the final one it is ``closed`` and holds nothing of the server's."""

    def __init__(self, sender: Any) -> None:
        self._sender: Any | None = sender
        self._asking = threading.Lock()  # held while the server is asked, and to close

    @property
    def closed(self) -> bool:
        """Whether the final response has been sent, is under way or could not be sent."""
        return self._sender is None

    def send(self, tensors: Sequence[NamedArray], *, final: bool) -> None:
        """Send a response with data.

        Raises CancelledError if it failed because the client has gone; the channel is closed then.
        Raises InternalError if it failed and the client is there; then the request has not ended.
        """
        small = sum(_size(array) for _, array in tensors) <= MAX_FINAL_BYTES
        try:
            made = [pb_utils.Tensor(name, array) for name, array in tensors]
            self._send(pb_utils.InferenceResponse(output_tensors=made), final and small)
            if final and not small:
                self._send(None, True)
        except (pb_utils.TritonModelException, MemoryError) as error:
            if self.is_cancelled():
                self._end(None)
                raise CancelledError("the client has gone") from error
            _LOG.warning("a response could not be sent: %s", error)
            raise InternalError("a response could not be sent") from error

    def fail(self, error: JitneyError) -> None:
        """Send ``error`` as the final response; its text opens with the name of its code. Once the
        channel is closed, nothing can be sent, and this does nothing."""
        code = getattr(pb_utils.TritonError, error.server_code)
        made = pb_utils.TritonError(error.client_message, code)
        self._end(pb_utils.InferenceResponse(error=made))

    def is_cancelled(self) -> bool:
        """Ask the server: a round trip of about 0.2 ms. False once the channel is closed, or if the
        server does not answer."""
        with self._asking:
            try:
                return self._sender is not None and bool(self._sender.is_cancelled())
            except pb_utils.TritonModelException as error:
                _LOG.debug("the server does not answer whether a client is there: %s", error)
                return False

    def _send(self, response: Any | None, final: bool) -> None:
        sender = self._sender
        assert sender is not None, "a send after the final response"
        if final:
            with self._asking:
                self._sender = None
            sender.send(response, pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        else:
            sender.send(response)

    def _end(self, response: Any | None) -> None:
        """The final response, without data."""
        try:
            if not self.closed:
                self._send(response, True)
        except pb_utils.TritonModelException as error:
            _LOG.warning("a final response could not be sent: %s", error)


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request that was accepted, and where its responses go."""

    key: int
    channel: Channel
    at: float
    """Monotonic seconds, as is the deadline."""
    deadline: float | None
    size: int = 0
    """Bytes that count towards what the front may have open."""
    request_id: str = ""
    """The client's, for logs and spans."""
    trace: Mapping[str, str] = field(default_factory=dict)
    """The headers of the trace that it belongs to."""
    tier: str = ""
    """Empty without tiers."""


def sweep(watched: "queue.SimpleQueue[tuple[int, Channel]]") -> Iterator[int]:
    """Ask the server once about each request of ``watched``. Yields the keys of those whose client
    has gone, and puts the others that are open back into ``watched``."""
    for _ in range(watched.qsize()):
        # Taken out before it is asked: a request whose question raises is dropped, and the next
        # sweep reaches those behind it.
        key, channel = watched.get()
        if channel.is_cancelled():
            yield key
        elif not channel.closed:
            watched.put((key, channel))


def _size(array: np.ndarray) -> int:
    return sum(map(len, array)) if array.dtype.kind == "O" else array.nbytes
