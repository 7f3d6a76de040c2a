"""Failures of a server of OpenAI's API, seen by a job: what is waited for, what is a bad row, what
ends the job. ``test_patience.py`` has the times."""

import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jitney.errors import InvalidArgumentError
from jitney_jobs import patience
from jitney_jobs.failures import JobRefusedError, ServerAwayError
from jitney_jobs.run import run_job

from tests.jobs.job_rows import bad, job_of, read, run, write_lines
from tests.jobs.scripted_api import Reply, ScriptedApi, scripted_api

MANY = [str(number) for number in range(60)]


@pytest.fixture(autouse=True)
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pauses that nobody asks for are short."""
    monkeypatch.setattr(patience, "_FIRST_PAUSE_S", 0.02)


def lines(folder: Path, *prompts: str, **changes: Any) -> Path:
    rows = []
    for prompt in prompts:
        body = {"model": "m", "prompt": prompt}
        row = {"custom_id": prompt, "method": "POST", "url": "/v1/completions", "body": body}
        rows.append({**row, **changes})
    return write_lines(folder / "in.jsonl", rows)


def asked(api: ScriptedApi, source: Path, output: Path, **settings: Any) -> bool:
    given = {"task": "generate", "map": None, "input_format": "openai", "server": api.url}
    return run(source, output, **{**given, **settings})


def custom_ids(output: Path) -> set[str]:
    return {row["custom_id"] for row in read(output)}


def failures(output: Path) -> dict[str, dict[str, Any]]:
    return {row["custom_id"]: row for row in bad(output)}


def test_connections_are_kept(tmp_path: Path) -> None:
    with scripted_api() as api:
        assert asked(api, lines(tmp_path, *MANY), tmp_path / "out", at_once=4)
        assert custom_ids(tmp_path / "out") == set(MANY)
        assert api.connections <= 4
        assert all("authorization" not in headers for headers in api.headers)


def test_no_key_of_the_environment_is_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OPENAI_API_KEY", "OPENAI_ORG_ID", "OPENAI_PROJECT_ID"):
        monkeypatch.setenv(name, "mine")
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    with scripted_api() as api:
        assert asked(api, lines(tmp_path, "a"), tmp_path / "out")
        assert "mine" not in str(api.headers)


@pytest.mark.parametrize("status", [429, 503])
def test_waits_as_long_as_it_is_told(tmp_path: Path, status: int) -> None:
    wait = Reply(status, headers={"retry-after": "1"})
    script = {word: lambda count: wait if count == 1 else Reply() for word in "abc"}
    with scripted_api(script) as api:
        assert asked(api, lines(tmp_path, *"abc"), tmp_path / "out", retries=0)
        assert custom_ids(tmp_path / "out") == set("abc")
        for word in "abc":
            first, second = api.times[word]
            assert second - first >= 0.99


def test_told_to_wait_for_an_hour_it_ends_at_once_and_says_so(tmp_path: Path) -> None:
    wait = Reply(429, headers={"retry-after": "3600"})
    with scripted_api({"a": lambda count: wait}) as api:
        began = time.monotonic()
        with pytest.raises(ServerAwayError, match=r"429.*asks to wait for 3,600 s.*patience"):
            asked(api, lines(tmp_path, "a"), tmp_path / "out")
        assert time.monotonic() - began < 5
        assert api.asked["a"] == 1


@pytest.mark.parametrize("status", [502, 503, 504, 500, 529, 404, 405, 413, 422, 501])
def test_a_line_that_always_fails_is_bad_and_no_other(tmp_path: Path, status: int) -> None:
    with scripted_api({"poison": lambda count: Reply(status)}) as api:
        source = lines(tmp_path, *MANY[:30], "poison", *MANY[30:])
        assert asked(api, source, tmp_path / "out", at_once=4)
    assert custom_ids(tmp_path / "out") == set(MANY)
    (failure,) = bad(tmp_path / "out")
    assert failure["custom_id"] == "poison"
    assert failure["error"] is None
    assert failure["response"]["status_code"] == status
    assert failure["response"]["body"] == {"error": {"message": f"it is {status}"}}


def test_a_line_at_which_the_server_hangs_up_is_bad(tmp_path: Path) -> None:
    with scripted_api({"poison": lambda count: None}) as api:
        source = lines(tmp_path, *MANY, "poison")
        assert asked(api, source, tmp_path / "out", at_once=1)
    assert custom_ids(tmp_path / "out") == set(MANY)
    (failure,) = bad(tmp_path / "out")
    assert failure["custom_id"] == "poison"
    assert failure["response"] is None
    assert failure["error"]["code"] == "request_failed"
    assert "does not answer" in failure["error"]["message"]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"<html>busy</html>", "<html>busy</html>"),
        (b'{"choices": [', '{"choices": ['),
        (b"[1]", "[1]"),
        (b"", ""),
        (b'{"error": {"message": "no room", "code": "x"}}', "no room"),
        (b'{"object": "error", "message": "no room", "code": 400}', None),
    ],
)
def test_an_answer_that_is_none_is_a_bad_row(tmp_path: Path, body: bytes, said: str | None) -> None:
    with scripted_api({"odd": lambda count: Reply(200, body)}) as api:
        assert asked(api, lines(tmp_path, *MANY, "odd"), tmp_path / "out", retries=1)
        assert api.asked["odd"] == (1 if said is None else 2)
    assert custom_ids(tmp_path / "out") == set(MANY)
    (failure,) = bad(tmp_path / "out")
    assert failure["response"]["status_code"] == 200
    if said is not None:
        assert failure["response"]["body"]["error"]["message"] == said


def test_a_status_inside_an_answer_counts(tmp_path: Path) -> None:
    busy = Reply(200, b'{"error": {"code": 429, "message": "busy"}}')
    with scripted_api({"a": lambda count: busy if count < 9 else Reply()}) as api:
        assert asked(api, lines(tmp_path, "a"), tmp_path / "out", retries=0)
    assert custom_ids(tmp_path / "out") == {"a"}


@pytest.mark.parametrize("status", [302, 307, 401, 402, 403])
def test_what_lets_nobody_in_ends_the_job_at_once(tmp_path: Path, status: int) -> None:
    elsewhere = Reply(status, headers={"location": "http://127.0.0.1:1/login"})
    with scripted_api(dict.fromkeys(MANY, lambda count: elsewhere)) as api:
        said = "127.0.0.1:1/login" if status < 400 else str(status)
        with pytest.raises(JobRefusedError, match=said):
            asked(api, lines(tmp_path, *MANY), tmp_path / "out", at_once=1)
        assert sum(api.asked.values()) <= 2


def test_a_server_that_is_started_late_or_again_is_waited_for(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    apis: list[ScriptedApi] = []

    def serve() -> None:
        for seconds in (0.3, 30.0):
            time.sleep(0.5)
            with scripted_api(port=port) as api:
                apis.append(api)
                done.wait(seconds)
            if done.is_set():
                return

    done = threading.Event()
    thread = threading.Thread(target=serve)
    thread.start()
    try:
        prompts = [str(number) for number in range(3000)]
        api = ScriptedApi({}, [])
        api.url = f"http://localhost:{port}"
        assert asked(api, lines(tmp_path, *prompts), tmp_path / "out", retries=0)
    finally:
        done.set()
        thread.join()
    assert len(read(tmp_path / "out")) == 3000
    assert custom_ids(tmp_path / "out") == set(prompts)
    assert not bad(tmp_path / "out")
    assert len(apis) == 2


def test_a_signal_ends_a_job_that_waits(tmp_path: Path) -> None:
    wait = Reply(429, headers={"retry-after": "300"})
    with scripted_api({"a": lambda count: wait}) as api:

        def stop() -> None:
            while not api.asked["a"]:
                time.sleep(0.01)
            time.sleep(0.3)
            os.kill(os.getpid(), signal.SIGINT)

        thread = threading.Thread(target=stop)
        thread.start()
        began = time.monotonic()
        assert not asked(api, lines(tmp_path, "a"), tmp_path / "out")
        thread.join()
        assert time.monotonic() - began < 5


def test_a_model_that_the_server_does_not_list_ends_the_job(tmp_path: Path) -> None:
    with scripted_api(models=["model-a", "model-b"]) as api:
        said = r"model is 'modle-a', but must be .*did you mean 'model-a'.*model-a, model-b"
        with pytest.raises(InvalidArgumentError, match=said):
            asked(api, lines(tmp_path, "a"), tmp_path / "out", model="modle-a")
        assert not api.asked
        assert asked(api, lines(tmp_path, "a"), tmp_path / "out", model="model-b")
        assert api.bodies[0]["model"] == "model-b"


def test_lines_name_their_models(tmp_path: Path) -> None:
    with scripted_api() as api:
        assert asked(api, lines(tmp_path, "a"), tmp_path / "out")
        assert api.bodies == [{"model": "m", "prompt": "a"}]


def test_nothing_is_streamed(tmp_path: Path) -> None:
    body = {"model": "m", "prompt": "a", "stream": True, "stream_options": {"include_usage": True}}
    with scripted_api() as api:
        assert asked(api, lines(tmp_path, "a", body=body), tmp_path / "out")
        assert api.bodies == [{"model": "m", "prompt": "a"}]


def test_a_line_of_20_mb(tmp_path: Path) -> None:
    text = "x" * (20 << 20)
    body = {"model": "m", "prompt": text}
    source = lines(tmp_path, "a", body=body)
    with scripted_api() as api:
        assert asked(api, source, tmp_path / "out")
        assert api.bodies == [body]
    with scripted_api(most_bytes=1000) as api:  # it answers, and hangs up, before it has read all
        assert asked(api, source, tmp_path / "out2")
    (failure,) = bad(tmp_path / "out2")
    assert failure["response"]["status_code"] == 413


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the key")
def test_tls(tmp_path: Path) -> None:
    certificate = tmp_path / "ca.pem"
    key = tmp_path / "key.pem"
    words = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=localhost"]
    names = ["-addext", "subjectAltName=DNS:localhost", "-keyout", str(key)]
    subprocess.run([*words, *names, "-out", certificate], check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    source = lines(tmp_path, *MANY[:20])
    with scripted_api(context=context) as api:
        with pytest.raises(JobRefusedError, match="CERTIFICATE_VERIFY_FAILED"):
            asked(api, source, tmp_path / "out")
        assert asked(api, source, tmp_path / "out", ca_file=str(certificate), at_once=2)
        assert custom_ids(tmp_path / "out") == set(MANY[:20])
    with scripted_api() as api:
        api.url = api.url.replace("http:", "https:")
        with pytest.raises(JobRefusedError, match="SSL"):
            asked(api, source, tmp_path / "out2")


def test_lines_that_failed_are_asked_again_alone(tmp_path: Path) -> None:
    script: dict[str, Any] = {"b": lambda count: Reply(400) if count == 1 else Reply()}
    script["c"] = lambda count: Reply(404)
    with scripted_api(script) as api:
        source = lines(tmp_path, *"abcda")
        settings = {"task": "generate", "map": None, "input_format": "openai", "server": api.url}
        job = job_of(source, tmp_path / "out", **settings)
        assert run_job(job)
        assert custom_ids(tmp_path / "out") == {"a", "d"}
        assert run_job(job, retry_bad=True)
        asked_of_each = dict(api.asked)
    assert asked_of_each == {"a": 1, "b": 2, "c": 2, "d": 1}
    assert custom_ids(tmp_path / "out") == {"a", "b", "d"}
    failed = bad(tmp_path / "out")
    assert [each["row"] for each in failed] == [2, 4]
    assert failed[0]["response"]["status_code"] == 404
    assert failed[1]["error"]["code"] == "duplicate_custom_id"


def test_a_repeated_custom_id_is_bad(tmp_path: Path) -> None:
    """The first line counts, whatever the order and the run."""
    rows = [json.loads(line) for line in lines(tmp_path, *"abac").read_text().splitlines()]
    rows[2]["body"]["prompt"] = "again"
    source = write_lines(tmp_path / "in.jsonl", rows)
    with scripted_api() as api:
        assert asked(api, source, tmp_path / "out")
        assert sorted(row["custom_id"] for row in read(tmp_path / "out")) == ["a", "b", "c"]
        assert "again" not in api.asked
    (failure,) = bad(tmp_path / "out")
    assert failure["row"] == 2
    assert failure["error"]["code"] == "duplicate_custom_id"
    assert failure["response"] is None


def test_lines_that_cannot_be_read_are_failures_in_the_services_form(tmp_path: Path) -> None:
    source = lines(tmp_path, "a")
    source.write_bytes(source.read_bytes() + b'{"custom_id": "torn", "bo\n[1]\n')
    with scripted_api() as api:
        assert asked(api, source, tmp_path / "out")
    assert custom_ids(tmp_path / "out") == {"a"}
    assert {row["error"]["code"] for row in bad(tmp_path / "out")} == {"invalid_json_line"}
    assert {row["custom_id"] for row in bad(tmp_path / "out")} == {None}


@pytest.fixture
def silent() -> Iterator[str]:
    """A port where connections are taken, and nothing is answered."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


def test_a_server_that_says_nothing_is_given_up(
    tmp_path: Path, silent: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jitney_jobs.openai_server.TIMEOUT_S", 0.3)
    with pytest.raises(ServerAwayError, match="does not answer"):
        run(
            lines(tmp_path, "a"),
            tmp_path / "out",
            task="generate",
            map=None,
            input_format="openai",
            server=silent,
            patience="1s",
        )


def test_a_line_that_takes_too_long_is_bad(tmp_path: Path) -> None:
    def never(count: int) -> Reply | None:
        time.sleep(4)
        return None

    with scripted_api({"b": never}) as api:
        assert asked(api, lines(tmp_path, *"abcde"), tmp_path / "out", row_timeout=0.5)
    assert custom_ids(tmp_path / "out") == set("acde")
    (failure,) = failures(tmp_path / "out").values()
    assert failure["custom_id"] == "b"
    assert failure["error"]["code"] == "request_timeout"
    assert "row_timeout (0.5 s)" in failure["error"]["message"]


def test_a_job_that_has_ended_leaves_no_thread(tmp_path: Path) -> None:
    before = threading.active_count()
    with scripted_api() as api:
        asked(api, lines(tmp_path, "a"), tmp_path / "out")
    deadline = time.monotonic() + 10
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert threading.active_count() <= before


def test_the_settings_of_a_job(tmp_path: Path) -> None:
    assert job_of(tmp_path / "in", tmp_path / "out").patience == "10m"
