"""One request's responses: the server's response sender, closed exactly once.

Owned by the thread in ``execute`` until the request is accepted, by the responder afterwards. Only
:meth:`Channel.is_cancelled` may be called from another thread at the same time. A send is a round
trip of 0.2 to 0.4 ms to the server, whatever its size, and never waits for the client.

The final response makes the server delete the object that :meth:`Channel.is_cancelled` asks; to ask
later, or at the same moment, crashes the whole server (2.51). Hence the lock: the channel closes
before it sends the final response, and before it closes it waits for an answer that is due.
"""

import logging
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from jitney.errors import JitneyError

_LOG = logging.getLogger(__name__)

NamedArray = tuple[str, np.ndarray]


class Channel:
    """Sends responses; after the final one it is ``closed`` and holds nothing of the server's."""

    def __init__(self, sender: Any) -> None:
        self._sender: Any | None = sender
        self._asking = threading.Lock()  # held while the server is asked, and to close

    @property
    def closed(self) -> bool:
        """Whether the final response has been sent, is under way or could not be sent."""
        return self._sender is None

    def send(self, tensors: Sequence[NamedArray], *, final: bool) -> bool:
        """Send a response with data. False: the client is gone, and the channel closed."""
        made = [pb_utils.Tensor(name, array) for name, array in tensors]
        return self._send(pb_utils.InferenceResponse(output_tensors=made), final)

    def fail(self, error: JitneyError) -> None:
        """Send ``error`` as the final response; its text opens with the name of its code."""
        code = getattr(pb_utils.TritonError, error.server_code)
        made = pb_utils.TritonError(error.client_message, code)
        self._send(pb_utils.InferenceResponse(error=made), True)

    def is_cancelled(self) -> bool:
        """Ask the server: a round trip of about 0.2 ms. False once the channel is closed, or if the
        server does not answer."""
        with self._asking:
            try:
                return self._sender is not None and bool(self._sender.is_cancelled())
            except pb_utils.TritonModelException as error:
                _LOG.debug("the server does not answer whether a client is there: %s", error)
                return False

    def _send(self, response: Any, final: bool) -> bool:
        sender = self._sender
        assert sender is not None, "a send after the final response"
        flags = 0
        if final:
            flags = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
            self._close()
        try:
            sender.send(response, flags)
        except pb_utils.TritonModelException as error:
            # The server drops a response whose client has gone; that is a cancellation.
            _LOG.debug("a response could not be sent: %s", error)
            if not final:
                self._close()
                self._end(sender)
            return False
        return True

    def _close(self) -> None:
        with self._asking:
            self._sender = None

    def _end(self, sender: Any) -> None:
        try:
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        except pb_utils.TritonModelException as error:
            _LOG.debug("a channel could not be closed: %s", error)
