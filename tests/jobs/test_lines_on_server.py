"""OpenAI's lines on a server of OpenAI's API: bodies and answers go through as they are."""

import http.client
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jitney.errors import CancelledError, InvalidArgumentError, UnavailableError
from jitney_jobs.asking import OpenAiRequest, OpenAiServer
from jitney_jobs.run import run_job

from tests.jobs.fake_api import KEY, STATUS, Api, api
from tests.jobs.job_rows import bad, job_of, read, run, write_lines


@pytest.fixture
def settings(tmp_path: Path) -> Iterator[dict[str, Any]]:
    """Of a job that may ask it."""
    keys = tmp_path / "keys"
    keys.write_text(f"jobs:{KEY}\n", encoding="utf-8")
    with api() as url:
        yield {
            "task": "generate", "map": None, "model": "m", "input_format": "openai", "retries": 1,
            "patience": "2s", "server": url, "api_key_file": str(keys),
        }  # fmt: skip


def line(custom_id: str, path: str = "/v1/completions", **body: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": path, "body": {"model": "x", **body}}


def test_bodies_and_answers_as_they_are(settings: dict[str, Any], tmp_path: Path) -> None:
    rows = [line(word, prompt=word, stream=True) for word in ("refused", "fault", "late", "busy")]
    rows += [line("e", "/v1/embeddings", input="a", priority=3), {"custom_id": "torn"}]
    source = write_lines(tmp_path / "in.jsonl", rows)
    assert run(source, tmp_path / "out", sampling={"priority": 10}, **settings)
    made = {row["custom_id"]: row["response"] for row in read(tmp_path / "out")}
    assert made.keys() == {"busy", "e"}
    assert made["busy"]["body"]["body"] == {"model": "m", "prompt": "busy", "priority": 10}
    asked = {"model": "m", "input": "a", "priority": 3}
    assert made["e"]["body"] == {"path": "/v1/embeddings", "body": asked}
    errors = {row["input"]["custom_id"]: row["error"] for row in bad(tmp_path / "out")}
    assert errors.keys() == {"refused", "fault", "late", "torn"}
    assert errors["refused"] == '400 {"error": "refused"}'
    assert Api.asked == {"refused": 1, "fault": 2, "late": 1, "busy": 2, "": 1}


@pytest.mark.parametrize("url", ["/v1/compl\u00e9tions", "/v1/a b", "/v1/a\nb", "/v1/a\x7f", ""])
def test_a_line_whose_url_cannot_be_sent_is_bad(
    settings: dict[str, Any], tmp_path: Path, url: str
) -> None:
    source = write_lines(tmp_path / "in.jsonl", [line("wrong", url), line("right", prompt="a")])
    assert run(source, tmp_path / "out", **settings)
    assert [row["custom_id"] for row in read(tmp_path / "out")] == ["right"]
    assert "printable ASCII" in bad(tmp_path / "out")[0]["error"]


def test_a_lines_own_limit_replaces_the_jobs(settings: dict[str, Any], tmp_path: Path) -> None:
    """Whatever it is called: a server refuses two."""
    rows = [
        line("own", max_tokens=7),
        line("newer", "/v1/chat/completions", max_completion_tokens=1000),
        line("newest", "/v1/responses", max_output_tokens=1000),
        line("none"),
    ]
    source = write_lines(tmp_path / "in.jsonl", rows)
    assert run(source, tmp_path / "out", max_tokens=64, **settings)
    asked = {row["custom_id"]: row["response"]["body"]["body"] for row in read(tmp_path / "out")}
    assert asked == {
        "own": {"model": "m", "max_tokens": 7},
        "newer": {"model": "m", "max_completion_tokens": 1000},
        "newest": {"model": "m", "max_output_tokens": 1000},
        "none": {"model": "m", "max_tokens": 64},
    }


def test_a_line_that_fails_while_others_do_not_is_bad(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    source = write_lines(tmp_path / "in.jsonl", [line("a", prompt="a"), line("g", prompt="gone")])
    assert run(source, tmp_path / "out", **settings)
    assert [row["custom_id"] for row in read(tmp_path / "out")] == ["a"]
    assert bad(tmp_path / "out")[0]["error"].startswith("404 ")


def test_a_server_that_is_away_ends_the_job_and_it_goes_on(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    source = write_lines(tmp_path / "in.jsonl", [line("g", prompt="gone")])
    with pytest.raises(UnavailableError, match="404"):
        run(source, tmp_path / "out", **settings)
    with pytest.raises(UnavailableError, match=r"127.0.0.1:1 does not answer"):
        run(source, tmp_path / "out", **{**settings, "server": "http://127.0.0.1:1"})
    wrong = tmp_path / "wrong"
    wrong.write_text(f"{KEY}-no-more\n", encoding="utf-8")
    with pytest.raises(UnavailableError, match="401") as caught:
        run(source, tmp_path / "out", **{**settings, "api_key_file": str(wrong)})
    assert KEY not in str(caught.value)
    STATUS["gone"] = 200
    try:
        assert run(source, tmp_path / "out", **settings)
    finally:
        STATUS["gone"] = 404
    assert [row["custom_id"] for row in read(tmp_path / "out")] == ["g"]


def test_addresses_go_with_their_formats(settings: dict[str, Any], tmp_path: Path) -> None:
    for changes in ({"server": "127.0.0.1:8001"}, {"input_format": "jsonl"}):
        with pytest.raises(InvalidArgumentError, match=r"server is .*for openai lines"):
            run(tmp_path / "in.jsonl", tmp_path / "out", **{**settings, **changes})


def test_a_cancelled_job_leaves_the_server(settings: dict[str, Any], tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", [line("a", prompt="for ever")])
    with pytest.raises(CancelledError):
        run_job(
            job_of(source, tmp_path / "out", **settings), wanted=lambda: not Api.asked["for ever"]
        )
    assert Api.left.wait(30)


def test_a_connection_that_is_aborted_while_it_connects_sends_nothing(
    settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = OpenAiServer(job_of(tmp_path / "in.jsonl", tmp_path / "out", **settings))
    connect = http.client.HTTPConnection.connect

    def connect_late(connection: http.client.HTTPConnection) -> None:
        server.abort()
        connect(connection)

    monkeypatch.setattr(http.client.HTTPConnection, "connect", connect_late)
    answer = server.ask(OpenAiRequest("/v1/completions", b'{"prompt": "a"}'))
    assert isinstance(answer, UnavailableError)
    assert not Api.asked
