"""What passes between the front's process and the engine's: frames over a socket pair.

A frame is its length, four bytes, and one msgspec message: ids, numbers and texts, no pickle. A
frame that was sent whole arrives, even if its sender is killed right afterwards.
"""

import select
import socket
import struct
import threading
from typing import Generic, TypeVar

import msgspec

from jitney.config import EngineConfig
from jitney.messages import Cancel, Finish, ModelInfo, StepReport, Submit

_LENGTH = struct.Struct("<I")
_READ_BYTES = 1 << 18

T = TypeVar("T")


class Start(msgspec.Struct, frozen=True, array_like=True, tag="start"):
    """The first message to the engine: load this."""

    config: EngineConfig
    tokenizer: bytes
    """The tokenizer's data, which the first engine sent in ``Ready``; empty in the Start of the
    first engine."""


class Stop(msgspec.Struct, frozen=True, array_like=True, tag="stop"):
    """The last message to the engine: end after the current step."""


class Ready(msgspec.Struct, frozen=True, array_like=True, tag="ready"):
    """The model is loaded."""

    info: ModelInfo
    tokenizer: bytes
    """For the front. The engine does not look into it."""


class LoadRefused(msgspec.Struct, frozen=True, array_like=True, tag="refused"):
    """The model cannot be loaded."""

    kind: str
    """Name of a class of ``errors``."""
    message: str


class RowOwner(msgspec.Struct, frozen=True, array_like=True):
    """The sequence of a step's row."""

    key: int
    index: int


class StepBegun(msgspec.Struct, frozen=True, array_like=True, tag="begun"):
    """A step is about to be launched, or grammars are about to be asked for the next one."""

    in_flight: list[RowOwner]
    """Of the steps that are in flight already."""
    new: list[RowOwner]
    """Of the step that is about to be launched; or those whose grammars are about to be asked."""


class Making(msgspec.Struct, frozen=True, array_like=True, tag="making"):
    """A resource is about to be made, or looked for."""

    number: int
    """Tells this work from all other work of its engine."""
    kind: str
    """``Source.kind``."""
    keys: list[int]
    """The requests that wait for it. Empty: the work that an earlier message with this number
    announced has ended."""


class Logged(msgspec.Struct, frozen=True, array_like=True, tag="logged"):
    """A log record of the engine's process."""

    logger: str
    level: int
    text: str


ToEngine = Start | Submit | Finish | Cancel | Stop
ToFront = Ready | LoadRefused | StepBegun | Making | StepReport | Logged


class Frames(Generic[T]):
    """One end of the socket pair, at which messages of type ``T`` arrive. Any thread may send, one
    receives."""

    def __init__(self, end: socket.socket, arriving: object) -> None:
        """``end`` is this process's socket of the pair, ``arriving`` the union ``T`` as a value."""
        self._end = end
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(arriving)
        self._sending = threading.Lock()
        self._received = bytearray()  # begins with a frame, which may not be whole yet
        self._poll = select.poll()
        self._poll.register(end, select.POLLIN)

    def pack(self, message: ToEngine | ToFront) -> bytes:
        """The frame of a message, for :meth:`send_packed`."""
        data = self._encoder.encode(message)
        return _LENGTH.pack(len(data)) + data

    def send_packed(self, frame: bytes) -> None:
        """Send a frame; waits while the other end is behind. Raises OSError if it is gone."""
        with self._sending:
            self._end.sendall(frame)

    def send(self, message: ToEngine | ToFront) -> None:
        """Send one message, as :meth:`send_packed` does."""
        self.send_packed(self.pack(message))

    def receive(self, timeout_s: float | None = None) -> T | None:
        """The next message; None if none has come in time. Raises EOFError if the other end is
        gone and everything that it sent has been received."""
        wait_ms = None if timeout_s is None else 1000 * timeout_s
        while True:
            message = self._take()
            if message is not None:
                return message
            if not self._poll.poll(wait_ms):
                return None
            try:
                data = self._end.recv(_READ_BYTES)
            except ConnectionResetError:
                data = b""
            if not data:
                raise EOFError
            self._received += data

    def close(self) -> None:
        """Close this end: the other one then receives EOFError."""
        self._end.close()

    def _take(self) -> T | None:
        """Take the first message out of what was received; None if it is not whole yet."""
        if len(self._received) < _LENGTH.size:
            return None
        (size,) = _LENGTH.unpack_from(self._received)
        end = _LENGTH.size + size
        if len(self._received) < end:
            return None
        # A view, so that a large message is not copied. It must be released before the deletion
        # below: a bytearray that has a view cannot shrink.
        with memoryview(self._received) as view:
            message = self._decoder.decode(view[_LENGTH.size : end])
        del self._received[:end]
        return message
