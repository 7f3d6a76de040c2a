"""The lines of a batch's input file, before it runs: each is a request of the batch's endpoint and
model, with a ``custom_id`` of its own."""

from collections.abc import Iterable
from typing import Annotated, Any, Literal

import msgspec
from jitney.errors import InvalidArgumentError, JitneyError, show
from jitney_gateway.refusals import FieldError, describe
from jitney_gateway.wire import MAX_BODY_BYTES, WireRecord, decode
from msgspec import Meta

from jitney_jobs.batches.records import BatchRecord

MAX_LINES = 50_000
MAX_FAULTS = 20
"""Most faults of its lines that a batch names."""
Fault = dict[str, Any]
"""OpenAI's object: code, message, param, line."""


class LineBody(msgspec.Struct):
    """What is read of a line's body here. The gateway checks the rest when it answers the line."""

    model: str


class BatchLine(WireRecord):
    """One line."""

    custom_id: Annotated[str, Meta(min_length=1, max_length=512)]
    method: Literal["POST"]
    url: str
    body: LineBody


def check_lines(batch: BatchRecord, lines: Iterable[bytes]) -> list[Fault]:
    """The first faults of the lines. Sets the batch's model, which is that of the first line, and
    the number of its requests."""
    faults: list[Fault] = []
    ids = set[str]()
    number = 0
    for number, line in enumerate(lines, 1):
        try:
            if line.strip():
                _check_line(line, batch, ids)
        except InvalidArgumentError as error:
            faults.append(fault_of(error, number))
        if len(faults) == MAX_FAULTS or len(ids) > MAX_LINES:
            break
    batch.request_counts["total"] = len(ids)
    if not faults and not 0 < len(ids) <= MAX_LINES:
        said = f"the input file must have 1 to {MAX_LINES:,} requests"
        faults.append(fault_of(FieldError("input_file_id", said), number))
    return faults


def _check_line(line: bytes, batch: BatchRecord, ids: set[str]) -> None:
    """Adds the line's ``custom_id`` to ``ids``. Raises InvalidArgumentError."""
    if len(line) > MAX_BODY_BYTES:
        raise InvalidArgumentError(f"the line has more than {MAX_BODY_BYTES:,} bytes")
    given = decode(line, BatchLine)
    if batch.model is None:
        batch.model = given.body.model
    _check_same("url", given.url, batch.endpoint)
    _check_same("body.model", given.body.model, batch.model)
    if given.custom_id in ids:
        raise FieldError("custom_id", "custom_id is that of an earlier line")
    ids.add(given.custom_id)


def _check_same(field: str, value: str, wanted: str) -> None:
    if value != wanted:
        raise FieldError(field, f"{field} is {show(value)}, but this batch is for {wanted!r}")


def fault_of(error: JitneyError, line: int) -> Fault:
    """What the batch says of it."""
    _, body = describe(error)
    said = body["error"]
    return {
        "code": said["code"],
        "message": said["message"],
        "param": said["param"],
        "line": line,
    }
