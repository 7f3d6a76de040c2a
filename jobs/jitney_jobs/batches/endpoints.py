"""``/v1/files`` and ``/v1/batches``: OpenAI's batch service, on a folder (``records.py``).

Files and batches of another API key are answered as if they did not exist. ``work.py`` runs the
batches.
"""

import asyncio
import contextlib
import re
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import islice
from typing import Annotated, Any, Literal

import msgspec
from fastapi import Request, Response
from fastapi.responses import FileResponse
from jitney.errors import InvalidArgumentError, JitneyError, UnavailableError, show
from jitney_gateway.document import TEXT, Endpoint, Handler, Schema
from jitney_gateway.document import record as record_schema
from jitney_gateway.http_answers import as_json
from jitney_gateway.refusals import FieldError, StatusError
from jitney_gateway.server_client import ServerClient
from jitney_gateway.wire import WireRecord
from msgspec import Meta

from jitney_jobs.batches.form import file_of, ignore_others, read_form
from jitney_jobs.batches.lines import Fault, check_lines, fault_of
from jitney_jobs.batches.records import (
    OPEN,
    BatchRecord,
    FileRecord,
    Folder,
    R,
    new_id,
    write_private,
)
from jitney_jobs.batches.work import start_batch
from jitney_jobs.times import due_at

_PIECE_BYTES = 1 << 20
_FILE_NAME_LENGTH = 256
_Short = Annotated[str, Meta(max_length=64)]
_Long = Annotated[str, Meta(max_length=512)]

_FORM = record_schema(
    file={"type": "string", "contentMediaType": "application/octet-stream"},
    purpose={"const": "batch"},
)
_FILE_FIELDS = tuple(name for name in FileRecord.__struct_fields__ if name != "owner")
_BATCH_FIELDS = tuple(name for name in BatchRecord.__struct_fields__ if name != "owner")
_LIST_FIELDS = ("object", "data", "has_more", "first_id", "last_id")
_MOST_FILES = 10_000
"""Most files of a page, and their number if the request has no ``limit``."""
_MOST_BATCHES = 100
_DEFAULT_BATCHES = 20


def _list_query(most: int, **more: Schema) -> dict[str, Schema]:
    limit = {"type": "integer", "minimum": 1, "maximum": most}
    order = {"enum": ["asc", "desc"]}
    return {"limit": limit, "after": TEXT, "order": order, **more}


class BatchRequest(WireRecord):
    """The body of ``/v1/batches``."""

    input_file_id: str
    endpoint: Literal["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings"]
    completion_window: str
    metadata: Annotated[dict[_Short, _Long], Meta(max_length=16)] | None = None


class Batches:
    """The endpoints. Without a folder each says how to get one."""

    def __init__(self, folder: Folder | None, backend: ServerClient) -> None:
        self._given_folder = folder
        self._backend = backend

    @property
    def _folder(self) -> Folder:
        if self._given_folder is None:
            raise StatusError(
                404,
                "this gateway keeps no files and batches: it does with the option --batches FOLDER",
            )
        return self._given_folder

    def endpoints(self) -> list[Endpoint]:
        """Of files and of batches."""
        return [*self._file_endpoints(), *self._batch_endpoints()]

    def _file_endpoints(self) -> list[Endpoint]:
        file = "/v1/files/{id}"
        return [
            Endpoint(
                method="POST",
                path="/v1/files",
                answer=self.upload,
                text="Keep a file.",
                form=_FORM,
                fields=_FILE_FIELDS,
            ),
            Endpoint(
                method="GET",
                path="/v1/files",
                answer=_in_thread(self._list_files),
                text="The files, the newest first.",
                query=_list_query(_MOST_FILES, purpose=TEXT),
                fields=_LIST_FIELDS,
            ),
            Endpoint(
                method="GET",
                path=file,
                answer=_in_thread(partial(self._get, FileRecord)),
                text="What is known of a file.",
                fields=_FILE_FIELDS,
            ),
            Endpoint(
                method="DELETE",
                path=file,
                answer=_in_thread(self._delete),
                text="Delete a file.",
                fields=("id", "object", "deleted"),
            ),
            Endpoint(
                method="GET",
                path=f"{file}/content",
                answer=_in_thread(self._content),
                text="A file's bytes.",
                content={"application/octet-stream": {}},
            ),
        ]

    def _batch_endpoints(self) -> list[Endpoint]:
        batch = "/v1/batches/{id}"
        return [
            Endpoint(
                method="POST",
                path="/v1/batches",
                answer=self.create,
                text=BatchRequest.__doc__,
                body=BatchRequest,
                fields=_BATCH_FIELDS,
            ),
            Endpoint(
                method="GET",
                path="/v1/batches",
                answer=_in_thread(self._list_batches),
                text="The batches, the newest first.",
                query=_list_query(_MOST_BATCHES),
                fields=_LIST_FIELDS,
            ),
            Endpoint(
                method="GET",
                path=batch,
                answer=_in_thread(partial(self._get, BatchRecord)),
                text="How far a batch is.",
                fields=_BATCH_FIELDS,
            ),
            Endpoint(
                method="POST",
                path=f"{batch}/cancel",
                answer=_in_thread(self._cancel),
                text="Cancel a batch.",
                fields=_BATCH_FIELDS,
            ),
        ]

    async def upload(self, request: Request) -> Response:
        """Keep a file, which comes in a form."""
        folder = self._folder
        form = await read_form(request)
        try:
            file = file_of(form, request)
            record = FileRecord(
                id=new_id("file-"),
                bytes=file.size or 0,
                created_at=int(time.time()),
                filename=(file.filename or "")[:_FILE_NAME_LENGTH],
                purpose="batch",
                owner=request.state.owner,
            )
            pieces = iter(lambda: file.file.read(_PIECE_BYTES), b"")
            await asyncio.to_thread(write_private, folder.files / record.id, pieces)
            await asyncio.to_thread(folder.save, record)
        finally:
            await form.close()
        return self._answer(record)

    async def create(self, request: Request, body: BatchRequest) -> Response:
        """Make a batch. If its lines or its model are at fault, its status is failed, and it names
        the faults."""
        try:
            batch, faults = await asyncio.to_thread(self._read, request, body)
            if not faults:
                faults = await self._faults_of_model(batch)
            if faults:
                batch.end("failed", faults)
                await asyncio.to_thread(self._folder.save, batch)
            else:
                path = self._folder.files / batch.input_file_id
                await asyncio.to_thread(start_batch, self._folder, batch, path)
        except FileNotFoundError:
            raise StatusError(404, f"{body.input_file_id!r} has just been deleted") from None
        return self._answer(batch)

    async def _faults_of_model(self, batch: BatchRecord) -> list[Fault]:
        """Raises UnavailableError: the client may come again."""
        try:
            await self._backend.find_model_for(batch.endpoint, str(batch.model))
        except UnavailableError:
            raise
        except JitneyError as error:
            return [fault_of(error, line=1)]
        return []

    def _read(self, request: Request, body: BatchRequest) -> tuple[BatchRecord, list[Fault]]:
        """The batch, and what is wrong with its lines."""
        now = time.time()
        due = _due_at(body.completion_window, now)
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
            owner=request.state.owner,
        )
        with (self._folder.files / source.id).open("rb") as lines:
            faults = check_lines(batch, lines)
        return batch, faults

    def _cancel(self, request: Request) -> Response:
        batch = self._load(BatchRecord, request.path_params["id"], request)
        if batch.status not in OPEN:
            raise StatusError(409, f"batch {batch.id} has ended: it is {batch.status}")
        with contextlib.suppress(FileNotFoundError):  # it has just ended
            (self._folder.work / batch.id / "cancel").touch()
        return self._answer(batch)

    def _get(self, kind: type[FileRecord | BatchRecord], request: Request) -> Response:
        return self._answer(self._load(kind, request.path_params["id"], request))

    def _delete(self, request: Request) -> Response:
        id_ = self._load(FileRecord, request.path_params["id"], request).id
        (self._folder.files / f"{id_}.json").unlink(missing_ok=True)
        (self._folder.files / id_).unlink(missing_ok=True)
        return as_json({"id": id_, "object": "file", "deleted": True})

    def _content(self, request: Request) -> Response:
        file = self._load(FileRecord, request.path_params["id"], request)
        return FileResponse(self._folder.files / file.id, media_type="application/octet-stream")

    def _list_files(self, request: Request) -> Response:
        query = request.query_params
        limit = _limit(query.get("limit"), default=_MOST_FILES, most=_MOST_FILES)
        ignore_others(query, ("limit", "after", "purpose", "order"), request)
        files = self._own(FileRecord, request)
        purpose = query.get("purpose")
        if purpose is not None:
            files = (file for file in files if file.purpose == purpose)
        return self._page(files, limit)

    def _list_batches(self, request: Request) -> Response:
        query = request.query_params
        limit = _limit(query.get("limit"), default=_DEFAULT_BATCHES, most=_MOST_BATCHES)
        ignore_others(query, ("limit", "after", "order"), request)
        return self._page(self._own(BatchRecord, request), limit)

    def _own(self, kind: type[R], request: Request) -> Iterator[R]:
        """The client's records, the newest first, or the oldest first with ``order`` asc in the
        query. With ``after``, only those behind the record of that id. A newer record has a greater
        id."""
        query = request.query_params
        after = query.get("after")
        is_ascending = _is_ascending(query.get("order"))
        records: Iterable[R] = self._folder.all(kind)
        if is_ascending:
            records = reversed(list(records))
        for record in records:
            if record.owner != request.state.owner:
                continue
            if after is None or _is_behind(record.id, after, is_ascending):
                yield record

    def _page(self, records: Iterable[FileRecord | BatchRecord], limit: int) -> Response:
        """The first of the records, at most ``limit``."""
        found = list(islice(records, limit + 1))  # one more tells whether there are more
        data = [self._as_client_sees(each) for each in found[:limit]]
        page = {
            "object": "list",
            "data": data,
            "has_more": len(found) > limit,
            "first_id": data[0]["id"] if data else None,
            "last_id": data[-1]["id"] if data else None,
        }
        return as_json(page)

    def _load(self, kind: type[R], id_: str, request: Request) -> R:
        """Raises StatusError for what is not the client's."""
        found = self._folder.load(kind, id_)
        if found.owner != request.state.owner:
            raise StatusError(404, f"{id_!r} does not exist")
        return found

    def _answer(self, record: FileRecord | BatchRecord) -> Response:
        return as_json(self._as_client_sees(record))

    def _as_client_sees(self, record: FileRecord | BatchRecord) -> dict[str, Any]:
        """With the progress of a batch, and without its owner."""
        if isinstance(record, BatchRecord):
            record = self._folder.with_progress(record)
        fields = msgspec.to_builtins(record)
        del fields["owner"]
        return fields


def _in_thread(answer: Callable[[Request], Response]) -> Handler:
    """A handler that answers in a thread, for it reads the disk."""

    async def handler(request: Request) -> Response:
        return await asyncio.to_thread(answer, request)

    return handler


def _is_ascending(order: str | None) -> bool:
    """Whether the oldest comes first. Raises FieldError."""
    if order not in (None, "asc", "desc"):
        raise FieldError("order", f"order is {show(order)}, but must be asc or desc")
    return order == "asc"


def _is_behind(id_: str, after: str, is_ascending: bool) -> bool:
    return id_ > after if is_ascending else id_ < after


def _limit(given: str | None, *, default: int, most: int) -> int:
    """Records of a page. Raises FieldError."""
    if given is None:
        return default
    if not re.fullmatch("[0-9]{1,5}", given) or not 1 <= int(given) <= most:
        raise FieldError("limit", f"limit must be a number from 1 to {most:,}")
    return int(given)


def _due_at(window: str, now: float) -> float:
    """When a batch of that window expires. Raises FieldError."""
    try:
        due = due_at(None, window, now)
    except InvalidArgumentError as error:  # in a job's words
        said = str(error).replace("within", "completion_window", 1)
        raise FieldError("completion_window", said) from None
    assert due is not None, "a window was given"
    return due
