"""``/v1/files`` and ``/v1/batches``: OpenAI's batch service, on a folder (``batch_records.py``).

Whatever belongs to another API key does not exist. What becomes of a batch is ``batch_work.py``'s.
"""

import asyncio
import contextlib
import re
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from functools import partial
from itertools import islice
from typing import Annotated, Any, Literal

import msgspec
from fastapi import Request, Response
from fastapi.responses import FileResponse
from jitney.errors import InvalidArgumentError, JitneyError, UnavailableError, show
from jitney_jobs.job import due_at
from msgspec import Meta
from starlette.datastructures import FormData, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser

from jitney_gateway.backend import Backend
from jitney_gateway.batch_records import (
    OPEN,
    BatchRecord,
    FileRecord,
    Folder,
    R,
    new_id,
    write_whole,
)
from jitney_gateway.batch_work import begin
from jitney_gateway.refusals import FieldError, StatusError, as_json, describe
from jitney_gateway.wire import MAX_BODY_BYTES, WireRecord, decode

MAX_FILE_BYTES = 200 << 20
MAX_LINES = 50_000
MAX_FAULTS = 20
"""That a batch tells of its lines."""
_MAX_FORM_BYTES = 64 << 10
"""Of a form besides its file."""
_LISTED = {FileRecord: (10_000, 10_000), BatchRecord: (20, 100)}
"""Records of a list: if it does not say how many, and at most."""
_PIECE = 1 << 20
_Short = Annotated[str, Meta(max_length=64)]
_Long = Annotated[str, Meta(max_length=512)]


class BatchRequest(WireRecord):
    """The body of ``/v1/batches``."""

    input_file_id: str
    endpoint: Literal["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings"]
    completion_window: str
    metadata: Annotated[dict[_Short, _Long], Meta(max_length=16)] | None = None


class _Body(msgspec.Struct):
    model: str


class _Line(WireRecord):
    custom_id: Annotated[str, Meta(min_length=1, max_length=512)]
    method: Literal["POST"]
    url: str
    body: _Body


class Batches:
    """The endpoints. Without a folder each says how to get one."""

    def __init__(self, folder: Folder | None, backend: Backend) -> None:
        self._at, self._backend = folder, backend

    @property
    def _folder(self) -> Folder:
        if self._at is None:
            said = (
                "this gateway keeps no files and batches: it does with the option --batches FOLDER"
            )
            raise StatusError(404, said)
        return self._at

    def routes(self) -> list[tuple[str, str, Callable[[Request], Awaitable[Response]], str]]:
        """Method, path, handler and what it does, but for that which makes a batch."""
        file, batch = "/v1/files/{id}", "/v1/batches/{id}"
        files, batches = partial(self._list, FileRecord), partial(self._list, BatchRecord)
        show_file, show_batch = partial(self._show, FileRecord), partial(self._show, BatchRecord)
        return [
            ("POST", "/v1/files", self.upload, "Keep a file."),
            ("GET", "/v1/files", partial(_in_thread, files), "The files, the newest first."),
            ("GET", file, partial(_in_thread, show_file), "What is known of a file."),
            ("DELETE", file, partial(_in_thread, self._delete), "Delete a file."),
            ("GET", f"{file}/content", partial(_in_thread, self._content), "A file's bytes."),
            ("GET", "/v1/batches", partial(_in_thread, batches), "The batches, the newest first."),
            ("GET", batch, partial(_in_thread, show_batch), "How far a batch is."),
            ("POST", f"{batch}/cancel", partial(_in_thread, self._cancel), "Cancel a batch."),
        ]

    async def upload(self, request: Request) -> Response:
        """A file, as a form."""
        folder = self._folder
        form = await _form(request)
        try:
            for name in form:
                if name not in ("file", "purpose"):
                    raise FieldError(name, f"{name} is unknown or not supported")
            file = form.get("file")
            if not isinstance(file, UploadFile):
                raise FieldError("file", "file is missing, or has no name")
            if form.get("purpose") != "batch":
                raise FieldError("purpose", "purpose must be 'batch': files are for nothing else")
            record = FileRecord(
                id=new_id("file-"),
                bytes=file.size or 0,
                created_at=int(time.time()),
                filename=(file.filename or "")[:256],
                purpose="batch",
                owner=request.state.key,
            )
            pieces = iter(lambda: file.file.read(_PIECE), b"")
            await asyncio.to_thread(write_whole, folder.files / record.id, pieces)
            await asyncio.to_thread(folder.save, record)
        finally:
            await form.close()
        return self._answer(record)

    async def create(self, request: Request, body: BatchRequest) -> Response:
        """A batch. One whose lines or model are at fault has failed, and says why."""
        try:
            batch, errors = await asyncio.to_thread(self._check, request, body)
            if not errors:
                errors = await self._faults_of_model(batch)
            if errors:
                batch.end("failed", errors)
                await asyncio.to_thread(self._folder.save, batch)
            else:
                path = self._folder.files / batch.input_file_id
                await asyncio.to_thread(begin, self._folder, batch, path)
        except FileNotFoundError:
            raise StatusError(404, f"{body.input_file_id!r} has just been deleted") from None
        return self._answer(batch)

    async def _faults_of_model(self, batch: BatchRecord) -> list[dict[str, Any]]:
        """Raises UnavailableError: the client may come again."""
        try:
            await self._backend.check(batch.endpoint, str(batch.model))
        except UnavailableError:
            raise
        except JitneyError as error:
            return [_said(error, 1)]
        return []

    def _check(
        self, request: Request, body: BatchRequest
    ) -> tuple[BatchRecord, list[dict[str, Any]]]:
        """The batch, and what is wrong with its lines."""
        now = time.time()
        due = due_at(None, body.completion_window, now)
        assert due is not None
        source = self._load(FileRecord, body.input_file_id, request)
        if source.purpose != "batch":
            raise FieldError("input_file_id", f"input_file_id names a file of {source.purpose!r}")
        batch = BatchRecord(
            id=new_id("batch_"),
            endpoint=body.endpoint,
            input_file_id=body.input_file_id,
            completion_window=body.completion_window,
            created_at=int(now),
            in_progress_at=int(now),
            expires_at=int(due),
            metadata=body.metadata,
            owner=request.state.key,
        )
        with (self._folder.files / source.id).open("rb") as file:
            return batch, _faults(batch, file)

    def _cancel(self, request: Request) -> Response:
        batch = self._load(BatchRecord, request.path_params["id"], request)
        if batch.status not in OPEN:
            raise StatusError(409, f"batch {batch.id} has ended: it is {batch.status}")
        with contextlib.suppress(FileNotFoundError):  # it has just ended
            (self._folder.work / batch.id / "cancel").touch()
        return self._answer(batch)

    def _show(self, kind: type[FileRecord | BatchRecord], request: Request) -> Response:
        return self._answer(self._load(kind, request.path_params["id"], request))

    def _delete(self, request: Request) -> Response:
        id_ = self._load(FileRecord, request.path_params["id"], request).id
        (self._folder.files / f"{id_}.json").unlink(missing_ok=True)
        (self._folder.files / id_).unlink(missing_ok=True)
        return as_json({"id": id_, "object": "file", "deleted": True})

    def _content(self, request: Request) -> Response:
        record = self._load(FileRecord, request.path_params["id"], request)
        path = self._folder.files / record.id
        return FileResponse(path, media_type="application/octet-stream")

    def _list(self, kind: type[FileRecord | BatchRecord], request: Request) -> Response:
        query = dict(request.query_params)
        default, most = _LISTED[kind]
        limit, after = query.pop("limit", str(default)), query.pop("after", "~")
        purpose = query.pop("purpose", None) if kind is FileRecord else None
        for name in query:
            raise FieldError(name, f"{name} is unknown or not supported")
        if not re.fullmatch("[0-9]{1,5}", limit) or not 1 <= int(limit) <= most:
            raise FieldError("limit", f"limit must be a number from 1 to {most:,}")
        own = (
            record
            for record in self._folder.all(kind)
            if record.owner == request.state.key and record.id < after
            if purpose in (None, getattr(record, "purpose", None))
        )
        found = list(islice(own, int(limit) + 1))
        data = [self._shown(record) for record in found[: int(limit)]]
        ids = [each["id"] for each in data] or [None]
        page = {"object": "list", "data": data, "has_more": len(found) > len(data)}
        return as_json({**page, "first_id": ids[0], "last_id": ids[-1]})

    def _load(self, kind: type[R], id_: str, request: Request) -> R:
        """Raises StatusError for what is not the client's."""
        record = self._folder.load(kind, id_)
        if record.owner != request.state.key:
            raise StatusError(404, f"{id_!r} does not exist")
        return record

    def _answer(self, record: FileRecord | BatchRecord) -> Response:
        return as_json(self._shown(record))

    def _shown(self, record: FileRecord | BatchRecord) -> dict[str, Any]:
        if isinstance(record, BatchRecord):
            record = self._folder.seen(record)
        made = msgspec.to_builtins(record)
        del made["owner"]
        return made


def _faults(batch: BatchRecord, lines: Iterable[bytes]) -> list[dict[str, Any]]:
    """Of its lines, the first ones. It gets the model, which is that of the first line, and the
    number of its requests."""
    faults: list[dict[str, Any]] = []
    ids, number = set[str](), 0
    for number, line in enumerate(lines, 1):
        try:
            if line.strip():
                _check_line(line, batch, ids)
        except InvalidArgumentError as error:
            faults.append(_said(error, number))
        if len(faults) == MAX_FAULTS or len(ids) > MAX_LINES:
            break
    batch.request_counts["total"] = len(ids)
    if not faults and not 0 < len(ids) <= MAX_LINES:
        said = f"the input file must have 1 to {MAX_LINES:,} requests"
        faults.append(_said(FieldError("input_file_id", said), number))
    return faults


def _check_line(line: bytes, batch: BatchRecord, ids: set[str]) -> None:
    """Raises InvalidArgumentError."""
    if len(line) > MAX_BODY_BYTES:
        raise InvalidArgumentError(f"the line has more than {MAX_BODY_BYTES:,} bytes")
    given = decode(line, _Line)
    batch.model = batch.model or given.body.model
    for field, value, wanted in (
        ("url", given.url, batch.endpoint),
        ("body.model", given.body.model, batch.model),
    ):
        if value != wanted:
            raise FieldError(field, f"{field} is {show(value)}, but this batch is for {wanted!r}")
    if given.custom_id in ids:
        raise FieldError("custom_id", "custom_id is that of an earlier line")
    ids.add(given.custom_id)


def _said(error: JitneyError, line: int) -> dict[str, Any]:
    said = describe(error)[1]["error"]
    return {**{name: said[name] for name in ("code", "message", "param")}, "line": line}


async def _in_thread(answer: Callable[[Request], Response], request: Request) -> Response:
    """It reads the disk."""
    return await asyncio.to_thread(answer, request)


async def _form(request: Request) -> FormData:
    """Large files go to the disk. Raises FieldError, and StatusError for one that is too large."""

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
    try:
        return await MultiPartParser(request.headers, pieces(), max_files=1, max_fields=8).parse()
    except MultiPartException as error:
        raise FieldError("file", f"the form cannot be read: {error.message}") from None
