"""One request's responses: the server's response sender, closed exactly once.

Owned by the responder once the request is accepted. Only :meth:`Channel.is_cancelled` and
:attr:`Channel.closed` may be used by another thread at the same time. A send is a round trip of
0.2 to 0.4 ms to the server, whatever its size, and never waits for the client.

The server takes no response after the final one, even if sending the final one has failed. And a
send may fail although the client is there: if the server's shared memory is full. Three rules
follow:

- Large data never travels in the final response. It leaves in a response before that, and the final
  response is empty. If sending the data fails, the request is still open, and an error can be sent.
- Before another response is sent, the memory of the one that could not be sent is given back.
- The end of a request waits until the memory has room (``stub_memory.has_room``).

The final response makes the server delete the request. A call of the server's ``is_cancelled``
during or after that crashes the whole server (2.51). So a lock is held during the call, and the
channel takes the same lock to mark itself closed before it sends the final response.
"""

import logging
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from jitney import stub_memory
from jitney.errors import CancelledError, InternalError, JitneyError

_LOG = logging.getLogger(__name__)

NamedArray = tuple[str, np.ndarray]
"""A tensor's name and its data."""

_EMPTY = None
"""The server's sender takes None for a response without data."""
MAX_FINAL_BYTES = 4096
"""Most bytes of data that travel in the final response. An empty final response needs about as much
shared memory, so data of this size hardly make a failure more likely."""


class SendError(InternalError):
    """A send has failed although the client is there."""


class Channel:
    """Sends responses; after the final one it is ``closed`` and holds nothing of the server's.

    :meth:`send` is for data and raises if a send fails. :meth:`fail` is for the end without data.
    If that fails, it is only logged, because nothing can be sent after it.
    """

    def __init__(self, sender: Any) -> None:
        self._sender: Any | None = sender
        # Held while a thread asks the server whether the client has gone, and to mark the channel
        # closed.
        self._asking = threading.Lock()

    @property
    def closed(self) -> bool:
        """Whether the final response has been sent, is under way or could not be sent."""
        return self._sender is None

    def send(self, tensors: Sequence[NamedArray], *, final: bool) -> None:
        """Send a response with data.

        Raises an error if that fails:

        - SendError if the server does not take the final response, whether the client has gone or
          not. The channel is closed, and nothing can be sent any more.
        - Otherwise CancelledError if the client has gone. The channel is closed.
        - Otherwise SendError. :meth:`fail` can still send an error.
        """
        failure = self._try_to_send(tensors, final=final)
        if failure is None:
            return
        if self.is_cancelled():  # False after a final response, because the channel is closed
            # The server keeps a request until its final response, client or not.
            self._close_with(_EMPTY)
            raise CancelledError("the client has gone")
        _LOG.warning("a response could not be sent: %s", failure)
        raise SendError("a response could not be sent")

    def _try_to_send(self, tensors: Sequence[NamedArray], *, final: bool) -> str | None:
        """Returns why a response could not be sent; None: it was sent.

        The reason is a text and not an exception. An exception would hold the response, and with it
        the shared memory of the tensors that did find room. The next send may need that memory.
        """
        size = sum(_size(array) for _, array in tensors)
        try:
            if final and size <= MAX_FINAL_BYTES:
                self._send_final(_response_of(tensors))
            else:
                # No variable holds this response. So its shared memory is free once it is sent,
                # and the final response can have that memory.
                self._send_more(_response_of(tensors))
                if final:
                    self._send_final(_EMPTY)
        except (pb_utils.TritonModelException, MemoryError) as error:
            return str(error) or "no memory"
        return None

    def fail(self, error: JitneyError) -> None:
        """Send ``error`` as the final response; its text opens with the name of its code. Once the
        channel is closed, nothing can be sent, and this does nothing."""
        code = getattr(pb_utils.TritonError, error.server_code)
        server_error = pb_utils.TritonError(error.client_message, code)
        self._close_with(pb_utils.InferenceResponse(error=server_error))

    def is_cancelled(self) -> bool:
        """Ask the server whether the client has gone: a round trip of about 0.2 ms. False once the
        channel is closed, if the server does not answer, or if the shared memory has no room for
        the question."""
        with self._asking:
            if self._sender is None or not stub_memory.has_room():
                return False
            try:
                return bool(self._sender.is_cancelled())
            except pb_utils.TritonModelException as error:
                _LOG.debug("the server does not answer whether a client is there: %s", error)
                return False

    def _close_with(self, response: Any) -> None:
        """Send a final response: an error, or ``_EMPTY``. Does nothing once the channel is closed.
        If the send fails, that is logged, because there is nobody left to tell."""
        if self.closed:
            return
        try:
            self._send_final(response)
        except (pb_utils.TritonModelException, MemoryError) as error:
            _LOG.warning("a final response could not be sent: %s", error)

    def _send_final(self, response: Any) -> None:
        """Raises the server's error. The channel is closed in any case."""
        sender = self._sender
        assert sender is not None, "a send after the final response"
        with self._asking:
            self._sender = None
        sender.send(response, pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def _send_more(self, response: Any) -> None:
        """Send a response that others follow. Raises the server's error."""
        assert self._sender is not None, "a send after the final response"
        self._sender.send(response)


def _response_of(tensors: Sequence[NamedArray]) -> Any:
    """The server's object of a response. It holds shared memory."""
    server_tensors = [pb_utils.Tensor(name, array) for name, array in tensors]
    return pb_utils.InferenceResponse(output_tensors=server_tensors)


def _size(array: np.ndarray) -> int:
    """Bytes of the tensor's data."""
    if array.dtype == object:  # strings
        return sum(map(len, array))
    return array.nbytes
