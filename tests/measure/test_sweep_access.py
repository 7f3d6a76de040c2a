"""Servers behind a proxy: TLS, headers and keys; what is refused is said, and no key is shown."""

import http.client
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from jitney.access import Access
from jitney.errors import InvalidArgumentError, UnavailableError
from jitney_measure import perf_analyzer
from jitney_measure.perf_analyzer import access_arguments
from jitney_measure.record import Load
from jitney_measure.server_counts import Snapshot, snapshot, stages
from jitney_measure.target import RefusedError, Target

from tests.http_server import Quiet, listening
from tests.measure.exports import MODEL, driver, script

KEY = "a-key-that-nobody-may-read-0123456789"
Answer = tuple[int, object] | tuple[int, object, dict[str, str]]


class Server:
    """Answers by path, and keeps what it was asked: (path, headers)."""

    def __init__(self, answers: dict[str, Answer]) -> None:
        self.answers = answers
        self.asked: list[tuple[str, dict[str, str]]] = []

    def answer(self, path: str, headers: dict[str, str]) -> Answer:
        self.asked.append((path, headers))
        return self.answers.get(path, (404, {"error": "no such path"}))


@contextmanager
def serving(answers: dict[str, Answer]) -> Iterator[tuple[str, Server]]:
    """``host:port`` and the server."""
    server = Server(answers)

    class Handler(Quiet):
        def do_GET(self) -> None:
            named = {name.lower(): value for name, value in self.headers.items()}
            status, body, *more = server.answer(self.path, named)
            raw = body.encode() if isinstance(body, str) else json.dumps(body).encode()
            self.send_response(status)
            for name, value in (more[0] if more else {}).items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(raw)))
            self.end_headers()
            self.wfile.write(raw)

    with listening(Handler) as address:
        yield address, server


def target_of(address: str, *headers: str, metrics: str | None = None) -> Target:
    return Target.of("127.0.0.1:8001", address, metrics, Access.of(headers=headers))


CONFIG = {
    "input": [{"name": "x", "data_type": "TYPE_FP32", "dims": ["4"]}],
    "output": [{"name": "y"}],
    "max_batch_size": 8,
}


# ------------------------------------------------------------------ what the user gives


def test_keys_and_headers_from_files(tmp_path: Path) -> None:
    keys = tmp_path / "api_keys"
    keys.write_text(
        f"# NAME:KEY\n\nfirst:{KEY} tiers=a,b min_priority=0\nsecond:{'b' * 30}\n", encoding="utf-8"
    )
    assert Access.of(api_key_file=keys).headers == (("authorization", f"Bearer {KEY}"),)
    keys.write_text(f"{KEY}\n", encoding="utf-8")
    assert Access.of(api_key_file=keys).headers == (("authorization", f"Bearer {KEY}"),)
    keys.write_bytes(b"\xef\xbb\xbf" + f"{KEY}\r\n".encode())  # as editors elsewhere save it
    assert Access.of(api_key_file=keys).headers == (("authorization", f"Bearer {KEY}"),)
    lines = tmp_path / "headers"
    lines.write_text(f"X-Api-Key: {KEY}\nX-Team:a:b\n", encoding="utf-8")
    made = Access.of(headers=[f"@{lines}", "X-More: 1"]).headers
    assert made == (("x-api-key", KEY), ("x-team", "a:b"), ("x-more", "1"))


@pytest.mark.parametrize(
    ("headers", "said"),
    [
        ([KEY], "header 1 must be NAME:VALUE"),
        (["X-A: 1", f"X Api Key:{KEY}"], "header 2 must be NAME:VALUE"),
        ([f"X-Key:{KEY}\x07"], "printable ASCII"),
        ([f"X-Key:{KEY}", f"x-key: {KEY}"], "a header is given twice"),
        (["@/nowhere"], "cannot read header /nowhere"),
    ],
)
def test_mistakes_show_no_value(headers: list[str], said: str) -> None:
    with pytest.raises(InvalidArgumentError, match=said) as caught:
        Access.of(headers=headers)
    assert KEY not in str(caught.value)


def test_files_that_hold_nothing_of_use(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.write_text("# nothing\n", encoding="utf-8")
    spaced = tmp_path / "spaced"
    spaced.write_text("name:a key\n", encoding="utf-8")
    for file in (empty, spaced):
        with pytest.raises(InvalidArgumentError, match="holds no key"):
            Access.of(api_key_file=file)
    with pytest.raises(InvalidArgumentError, match="no certificate in PEM"):
        Access.of(ca_file=empty)
    with pytest.raises(InvalidArgumentError, match=r"cannot read ca_file .*nowhere: No such file"):
        Access.of(ca_file=tmp_path / "nowhere")


def test_a_key_is_in_no_representation() -> None:
    access = Access.of(headers=[f"Authorization: Bearer {KEY}"])
    for shown in (access, Target.of("h:1", None, None, access)):
        assert KEY not in repr(shown)
    for said in (f"Bearer {KEY}", f"got {KEY}, bad"):
        assert KEY not in access.hide(said)
    assert access.hide("a bad Bearer token") == "a bad Bearer token"
    # A short value stands in every text, and must not break up a key before it is found.
    access = Access.of(headers=["X-Team: a", f"Cookie: session={KEY}; a=1", f"Other: {KEY}-more"])
    assert access.hide("status 1 at a.b") == "status 1 at a.b"
    for said in (KEY, f"{KEY}-more", f"session={KEY}", f"session={KEY}; a=1"):
        assert access.hide(f"what is {said}?") in ("what is …?", "what is session=…?")
    quoted = Access.of(headers=['X-Key: half"other-half'])
    assert "other-half" not in quoted.hide(json.dumps({"error": 'half"other-half'}))


def test_no_error_of_a_hang_has_the_key(tmp_path: Path) -> None:
    """The library's own has the command line: it is not raised on."""
    made = driver(script(tmp_path, "exec sleep 600"))
    access = Access.of(headers=[f"Authorization: Bearer {KEY}"])
    target = Target.of("here:8001", None, None, access)
    words = made.arguments(target, MODEL, Load("concurrency", 1), tmp_path, 8, tmp_path)

    assert not made.tool.run(words, access, tmp_path / "log", 0.1)


# ------------------------------------------------------------------ what perf_analyzer is told


def test_arguments_for_perf_analyzer() -> None:
    access = Access(True, Path("ca.pem"), (("authorization", f"Bearer {KEY}"),))
    # The name in lower case: gRPC ends the process at any other.
    key = ["-H", f"authorization:Bearer {KEY}"]
    tls = ["--ssl-grpc-use-ssl", "true", "--ssl-grpc-root-certifications-file", "ca.pem"]
    assert access_arguments(access, "grpc") == [*tls, *key]
    assert access_arguments(access, "http") == ["--ssl-https-ca-certificates-file", "ca.pem", *key]
    assert access_arguments(Access(), "grpc") == access_arguments(Access(), "http") == []
    assert access_arguments(Access(True), "grpc") == ["--ssl-grpc-use-ssl", "true"]
    target = Target.of("proxy:8443", None, None, access)
    assert (target.http, target.metrics) == ("proxy:8443", None)
    assert target.address("grpc") == "proxy:8443"
    assert target.address("http") == "https://proxy:8443"
    assert Target.of("h:1", None, None).address("http") == "h:8000"


def test_what_perf_analyzer_repeats_is_hidden(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(perf_analyzer, "snapshot", lambda *_: Snapshot())
    made = driver(script(tmp_path, f'echo "error: bad header Bearer {KEY}"; exit 3'))
    access = Access.of(headers=[f"Authorization: Bearer {KEY}"])
    target = Target.of("here:8001", None, None, access)
    load = Load("concurrency", 1)
    assert KEY in " ".join(made.arguments(target, MODEL, load, tmp_path, 8, tmp_path))
    (remark,) = made.run(target, MODEL, load).remarks
    assert "bad header" in remark
    assert KEY not in remark


# ------------------------------------------------------------------ what the server answers


def test_a_key_goes_along_and_its_absence_is_named() -> None:
    with serving({"/v2": (200, {"name": "triton", "version": "2"})}) as (address, server):
        assert target_of(address, f"Authorization: Bearer {KEY}").server() == "triton 2"
        assert server.asked[0][1]["authorization"] == f"Bearer {KEY}"
    refusal = (401, {"error": f"what is {KEY}?"})
    asked = {"/v2/models/stats": refusal, "/v2/models/m/config": refusal}
    with serving(asked) as (address, _):
        for name in ("m", None):
            with pytest.raises(InvalidArgumentError, match=r"401.*--api-key-file") as caught:
                target_of(address, f"Authorization: Bearer {KEY}").model(name)
            assert KEY not in str(caught.value)


def test_a_key_is_not_carried_to_another_place() -> None:
    """Neither by a redirection, nor to metrics of another host or, beside TLS, in clear."""
    key = f"Authorization: Bearer {KEY}"
    metrics = {"/metrics": (200, "jitney_x 1\n")}
    with serving(metrics) as (other, elsewhere):
        redirect = (307, {}, {"Location": f"http://{other}/metrics"})
        with serving({"/v2": redirect, **metrics}) as (address, server):
            with pytest.raises(RefusedError, match="does not answer as Triton does"):
                target_of(address, key).server()
            near = target_of(address, key, metrics=f"http://{address}/metrics")
            assert near.metrics_text() == "jitney_x 1\n"
            assert server.asked[-1][1]["authorization"] == f"Bearer {KEY}"
        port = other.rpartition(":")[2]
        far = target_of("127.0.0.1:1", key, metrics=f"http://localhost:{port}/metrics")
        access = Access(True, None, (("authorization", f"Bearer {KEY}"),))
        clear = Target.of("127.0.0.1:1", None, f"http://{other}/metrics", access)
        for target in (far, clear):
            target.metrics_text()
        assert len(elsewhere.asked) == 3
        assert not any("authorization" in headers for _, headers in elsewhere.asked)


@pytest.mark.parametrize("answer", [[], {}, {"model_stats": [1]}, {"model_stats": None}])
def test_a_server_that_is_none_of_tritons(answer: object) -> None:
    with (
        serving({"/v2/models/stats": (200, answer)}) as (address, _),
        pytest.raises(InvalidArgumentError, match="does not answer as Triton does"),
    ):
        target_of(address).model(None)


def test_what_is_no_http_is_said_without_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    def echo(*_: object, **__: object) -> None:
        raise http.client.BadStatusLine(f"got Bearer {KEY}\x1b[31m")

    monkeypatch.setattr("urllib.request.OpenerDirector.open", echo)
    with pytest.raises(UnavailableError, match="nothing answers") as caught:
        target_of("127.0.0.1:1", f"Authorization: Bearer {KEY}").server()
    assert KEY not in str(caught.value)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("status", [403, 404])
def test_a_server_that_keeps_its_statistics_back(status: int) -> None:
    """The model is found by its name; the measurement goes without the server's counts."""
    back = (status, {"error": "no such path"})
    with serving({"/v2/models/m/config": (200, CONFIG), "/v2/models/stats": back}) as (
        address,
        _,
    ):
        target = target_of(address)
        assert target.model("m").max_batch_size == 8
        with pytest.raises(InvalidArgumentError, match=rf"say which model.*answers {status}"):
            target.model(None)
        with pytest.raises(RefusedError, match="/v2/models/n/config answers 404"):
            target.model("n")
        before = snapshot(target, MODEL)
        (missing,) = before.missing
        assert missing.startswith("no statistics of the server (http://")
        assert "answers 404" in missing
        assert stages(before, before) == ()
