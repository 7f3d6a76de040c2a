"""The body of a request: whether it may come in that form, its bytes, and its size.

``app.py`` reads every JSON body here.
"""

import asyncio
import zlib
from collections.abc import AsyncIterator, Mapping, Sequence

from fastapi import Request

from jitney_gateway.refusals import FieldError, StatusError
from jitney_gateway.wire import MAX_BODY_BYTES

_GZIP = 16 + zlib.MAX_WBITS
"""What tells zlib that gzip's header and checksum stand around the data."""
_ENCODINGS = ("gzip", "x-gzip")
BODY_S = 120.0
"""Seconds that a client may take to send a body. Files have no such bound."""


def check_content_type(headers: Mapping[str, str]) -> None:
    """Raises StatusError for a body that is not declared as JSON.

    A browser lets a page of any site send other types of bodies. Before it sends JSON, it asks the
    gateway whether the page may.
    """
    content_type = headers.get("content-type", "")
    media_type = content_type.partition(";")[0].strip().lower()
    if media_type != "application/json":
        shown = repr(content_type[:64]) if content_type else "missing"
        reason = f"the header Content-Type is {shown}, but must be application/json"
        raise StatusError(415, reason)


def check_origin(headers: Mapping[str, str], allowed: Sequence[str]) -> None:
    """Raises StatusError for a form, or a request without a body, of a page that none of the
    ``allowed`` origins has. A browser sends those without asking. Other clients name no origin.
    Without any allowed origin, pages are not thought of."""
    origin = headers.get("origin")
    if not allowed or origin is None or "*" in allowed or origin in allowed:
        return
    raise StatusError(403, f"the origin {origin[:64]!r} may not use this gateway")


def check_not_encoded(headers: Mapping[str, str]) -> None:
    """Raises StatusError if the body is compressed."""
    encoding = _encoding(headers)
    if encoding:
        reason = f"the header Content-Encoding is {encoding[:64]!r}: only JSON may be compressed"
        raise StatusError(415, reason)


async def read_body(request: Request) -> bytes:
    """The bytes, decompressed. Raises StatusError for a body that is too large or too slow, as soon
    as that is seen, and for an encoding that is not gzip; FieldError for one that is no gzip."""
    pieces: AsyncIterator[bytes] = request.stream()
    encoding = _encoding(request.headers)
    if encoding in _ENCODINGS:
        pieces = _decompressed(pieces)
    elif encoding:
        reason = f"the header Content-Encoding is {encoding[:64]!r}, but only gzip is taken"
        raise StatusError(415, reason)
    data = bytearray()
    try:
        async with asyncio.timeout(BODY_S):
            async for piece in pieces:
                data += piece
                if len(data) > MAX_BODY_BYTES:
                    raise StatusError(413, f"the body has more than {MAX_BODY_BYTES:,} bytes")
    except TimeoutError:
        raise StatusError(408, f"the body did not come within {BODY_S:.0f} s") from None
    return bytes(data)


def _encoding(headers: Mapping[str, str]) -> str:
    """The encoding of a body; empty if it comes as it is."""
    encoding = headers.get("content-encoding", "").strip().lower()
    return "" if encoding == "identity" else encoding


async def _decompressed(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """What gzip has compressed, in pieces of at most one byte more than a body may have: a small
    piece may hold gigabytes."""
    most = MAX_BODY_BYTES + 1
    member = zlib.decompressobj(_GZIP)
    has_begun = False
    num_bytes = 0
    async for piece in pieces:
        num_bytes += len(piece)
        if num_bytes > MAX_BODY_BYTES:  # members may be empty
            raise StatusError(413, f"the body has more than {MAX_BODY_BYTES:,} bytes")
        while piece:
            if member.eof:  # gzip may have several members, one behind the other
                member = zlib.decompressobj(_GZIP)
            has_begun = True
            try:
                yield member.decompress(piece, most)
            except zlib.error as error:
                raise FieldError("", f"the body is no gzip: {error}") from None
            piece = member.unconsumed_tail or member.unused_data
    if has_begun and not member.eof:
        raise FieldError("", "the body is no gzip: it ends too early")
