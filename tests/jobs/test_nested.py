"""Names with dots lead into the values of a row."""

from typing import Any

import pytest
from jitney.errors import InvalidArgumentError
from jitney_jobs.generate import GenerateOnServer
from jitney_jobs.job_making import make_job
from jitney_jobs.nested import source_column, value_at

ROW: dict[str, Any] = {
    "doc": {"text": "t", "parts": [{"title": "first"}, {"title": None}], "empty": None},
    "a.b": {"c": 1},
    "a": {"b": {"c": 2}},
}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("doc.text", "t"),
        ("doc.parts.0.title", "first"),
        ("a.b.c", 1),
        ("a.b", {"c": 1}),
    ],
)
def test_what_a_name_leads_to(name: str, value: Any) -> None:
    assert value_at(ROW, name) == value


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nothing", "column 'nothing' is missing"),
        ("doc.txet", "column 'doc.txet' is missing: there is no 'txet'"),
        ("doc.text.more", "'doc.text.more' is missing: there is no 'more'"),
        ("doc.parts.2", "there is no '2'"),
        ("doc.parts.1.title", "column 'doc.parts.1.title' is empty"),
        ("doc.empty.more", "column 'doc.empty.more' is empty"),
    ],
)
def test_a_name_that_leads_to_nothing(name: str, message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        value_at(ROW, name)


def test_the_column_that_must_be_read() -> None:
    assert source_column("doc.text", ["doc", "text"]) == "doc"
    assert source_column("a.b.c", ["a", "a.b"]) == "a.b"
    assert source_column("b.c", ["a"]) is None


@pytest.mark.parametrize(
    "settings", [{"prompt": "{doc.text}!"}, {"template": "{{ doc.text }}!"}, {"column": "doc.text"}]
)
def test_prompts_of_nested_values(settings: dict[str, Any]) -> None:
    given = {"input": "in", "output": "out", "model": "m", "server": "host:8001", **settings}
    prepared = GenerateOnServer(make_job(given)).prepare(ROW)
    assert prepared["text_input"].item().rstrip(b"!") == b"t"
