"""Files of JSON that are no lines give the same objects as lines, and where each begins."""

import io
import json
from typing import Any

import pytest
from jitney_jobs import json_values
from jitney_jobs.json_values import lines_or_values

ROWS: list[Any] = [
    {"a": 'x, "y"] \\', "b": [1, {"c": []}], "d": "{[\n"},
    {},
    {"e": "Zürich", "f": '\\\\"' * 3},
]


def rows_of(data: bytes) -> list[Any]:
    found = list(lines_or_values(io.BytesIO(data), "a.json"))
    rows = [json.loads(each.text.decode("utf-8-sig")) for each in found]
    places = [data[each.offset : each.offset + len(each.text)] for each in found]
    assert [json.loads(place.decode("utf-8-sig")) for place in places] == rows
    return rows


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("block_bytes", [1, 7, 1 << 20])
@pytest.mark.parametrize("mark", ["", "\ufeff", "\ufeff \n"])
def test_an_array(
    monkeypatch: pytest.MonkeyPatch, indent: int | None, block_bytes: int, mark: str
) -> None:
    monkeypatch.setattr(json_values, "_BLOCK_BYTES", block_bytes)
    data = mark + json.dumps(ROWS, indent=indent, ensure_ascii=False)
    assert rows_of(data.encode()) == ROWS


def test_objects_that_are_indented() -> None:
    """As jq writes them."""
    rows = [{"n": 1}, *ROWS]
    assert rows_of("\n".join(json.dumps(row, indent=2) for row in rows).encode()) == rows


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        (b" [\n ]\n", []),
        (b'[{"n": 1}]\n[{"n": 2}]', [{"n": 1}, {"n": 2}]),
        (b'{"n": 1}\n\n{"n": 2}\n', [{"n": 1}, {"n": 2}]),
        (b"", []),
        (b"\n\n{}", [{}]),
    ],
)
def test_arrays_and_lines(text: bytes, rows: list[Any]) -> None:
    assert rows_of(text) == rows
