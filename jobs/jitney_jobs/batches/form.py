"""What a client sends to the endpoints of files and batches beside JSON: a form with a file, and
fields that have no effect.
"""

from collections.abc import AsyncGenerator, Iterable

from fastapi import Request
from jitney_gateway.refusals import FieldError, StatusError
from starlette.datastructures import FormData, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser

MAX_FILE_BYTES = 200 << 20
_MAX_FORM_BYTES = 64 << 10
"""The most bytes of a form besides its file."""


async def read_form(request: Request) -> FormData:
    """The form that was sent; a large file goes to the disk. Raises FieldError, and StatusError for
    one that is too large."""

    async def pieces() -> AsyncGenerator[bytes]:
        size = 0
        async for piece in request.stream():
            size += len(piece)
            if size > MAX_FILE_BYTES + _MAX_FORM_BYTES:
                raise StatusError(413, f"the file has more than {MAX_FILE_BYTES:,} bytes")
            yield piece

    kind = request.headers.get("content-type", "")
    if not kind.lower().startswith("multipart/form-data"):
        raise FieldError("file", "file must come in a body of multipart/form-data")
    parser = MultiPartParser(request.headers, pieces(), max_files=1, max_fields=8)
    try:
        return await parser.parse()
    except MultiPartException as error:
        raise FieldError("file", f"the form cannot be read: {error.message}") from None


def file_of(form: FormData, request: Request) -> UploadFile:
    """The form's file. Raises FieldError."""
    ignore_others(form, ("file", "purpose"), request)
    file = form.get("file")
    if not isinstance(file, UploadFile):
        raise FieldError("file", "file is missing, or has no name")
    if form.get("purpose") != "batch":
        raise FieldError("purpose", "purpose must be 'batch': files are for nothing else")
    return file


def ignore_others(given: Iterable[str], known: tuple[str, ...], request: Request) -> None:
    """Note which fields of a query or a form have no effect: a header of the answer names them. A
    strict gateway refuses them instead, so that ``ignored.add`` raises FieldError."""
    for name in given:
        if name not in known:
            request.state.ignored.add(name)
