"""Reads the body of a request, and checks the headers that say in which form it comes.

``gateway.py`` calls this for every request with a body.
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
_MOST_MEMBERS = 100
"""In a body. Each takes as long as thousands of bytes: with a great many of them, the gateway
would answer nobody for seconds."""
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
    """Raises StatusError for a request of a web page whose origin is not ``allowed``.

    This is for forms, and for requests without a body: a browser sends those for any page. Clients
    that are no browsers name no origin.

    Nothing is checked if ``allowed`` is empty: then the gateway was started without the option
    ``--allow-origin``, and only keys protect it.
    """
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
    """The bytes of a body, decompressed.

    Raises StatusError for a body that is too large or too slow, as soon as that is seen, and for an
    encoding other than gzip. Raises FieldError for a body that should be gzip and is not.
    """
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
    """The decompressed body, in pieces."""
    # A few compressed bytes may hold gigabytes. So a piece ends one byte after what a body may
    # have: with that byte, `read_body` refuses it.
    most = MAX_BODY_BYTES + 1
    # gzip may have several members, one behind the other.
    member = zlib.decompressobj(_GZIP)
    num_members = 1
    has_begun = False
    num_bytes = 0
    async for piece in pieces:
        num_bytes += len(piece)
        if num_bytes > MAX_BODY_BYTES:  # there may be many empty blocks
            raise StatusError(413, f"the body has more than {MAX_BODY_BYTES:,} bytes")
        rest = piece
        while rest:
            if member.eof:
                num_members += 1
                if num_members > _MOST_MEMBERS:
                    raise StatusError(413, f"the body has more than {_MOST_MEMBERS} gzip members")
                member = zlib.decompressobj(_GZIP)
            has_begun = True
            try:
                yield member.decompress(rest, most)
            except zlib.error as error:
                raise FieldError("", f"the body is no gzip: {error}") from None
            # What did not fit into this piece, or what follows the member.
            rest = member.unconsumed_tail or member.unused_data
    if has_begun and not member.eof:
        raise FieldError("", "the body is no gzip: it ends too early")
