"""Servers behind a proxy: TLS, headers and keys; what is refused is said, and no key is shown."""

import http.client
import json
import ssl
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from jitney.errors import InvalidArgumentError, UnavailableError
from jitney.sweep import counters, point
from jitney.sweep.access import Access
from jitney.sweep.record import Load
from jitney.sweep.target import RefusedError, Target

from tests.sweep.exports import PLAN, driver, script

KEY = "a-key-that-nobody-may-read-0123456789"
Answer = tuple[int, object] | tuple[int, object, dict[str, str]]


class Server:
    """Answers by path, and keeps what it was asked: (path, headers)."""

    def __init__(self, answers: dict[str, list[Answer]]) -> None:
        self.answers = answers
        self.asked: list[tuple[str, dict[str, str]]] = []

    def answer(self, path: str, headers: dict[str, str]) -> Answer:
        self.asked.append((path, headers))
        prepared = self.answers.get(path, [(404, {"error": "no such path"})])
        return prepared.pop(0) if len(prepared) > 1 else prepared[0]


@contextmanager
def serving(answers: dict[str, list[Answer]]) -> Iterator[tuple[str, Server]]:
    """``host:port`` and the server."""
    server = Server(answers)

    class Handler(BaseHTTPRequestHandler):
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

        def log_message(self, *_: object) -> None:
            pass

    listening = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=listening.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"127.0.0.1:{listening.server_address[1]}", server
    finally:
        listening.shutdown()
        thread.join()
        listening.server_close()


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
    keys.write_text(f"# NAME:KEY\n\nfirst:{KEY}\nsecond:{'b' * 30}\n", encoding="utf-8")
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
        ([f"X-Key:{KEY}\r\nX-Other: 1"], "printable ASCII"),
        ([f"X-Key\r\nX-Other:{KEY}"], "printable ASCII"),
        ([f"X-Key:{KEY}", f"x-key: {KEY}"], "header x-key is given twice"),
        (["X-Key:"], "header 1"),
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
    with pytest.raises(InvalidArgumentError, match="holds no key"):
        Access.of(api_key_file=empty)
    empty.write_text(f"{KEY} {KEY}\n", encoding="utf-8")
    with pytest.raises(InvalidArgumentError, match="cannot be sent") as caught:
        Access.of(api_key_file=empty)
    assert KEY not in str(caught.value)
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


def test_no_traceback_has_the_key(tmp_path: Path) -> None:
    """Whatever fails while perf_analyzer runs: the library's own error has its command line."""
    made = driver(script(tmp_path, "exec sleep 9"))
    access = Access.of(headers=[f"Authorization: Bearer {KEY}"])
    target = Target.of("here:8001", None, None, access)
    command = point.Driver(made.tool, target, made.model, PLAN, "grpc").command(
        Load("concurrency", 1), tmp_path, 8, tmp_path
    )

    def failing(share: float) -> None:
        raise RuntimeError(share)

    with pytest.raises(RuntimeError) as caught:
        point._execute(command, made.tool, access, tmp_path, 1.0, failing)
    shown = "".join(traceback.format_exception(caught.value))
    assert KEY not in shown
    assert "RuntimeError" in shown


# ------------------------------------------------------------------ what perf_analyzer is told


def test_words_for_perf_analyzer() -> None:
    access = Access(True, Path("ca.pem"), (("authorization", f"Bearer {KEY}"),))
    # The name in lower case: gRPC ends the process at any other.
    key = ["-H", f"authorization:Bearer {KEY}"]
    tls = ["--ssl-grpc-use-ssl", "true", "--ssl-grpc-root-certifications-file", "ca.pem"]
    assert access.words("grpc") == [*tls, *key]
    assert access.words("http") == ["--ssl-https-ca-certificates-file", "ca.pem", *key]
    assert Access().words("grpc") == Access().words("http") == []
    assert Access(True).words("grpc") == ["--ssl-grpc-use-ssl", "true"]
    target = Target.of("proxy:8443", None, None, access)
    assert (target.http, target.metrics) == ("proxy:8443", None)
    assert target.address("grpc") == "proxy:8443"
    assert target.address("http") == "https://proxy:8443"
    assert Target.of("h:1", None, None).address("http") == "h:8000"


def test_what_perf_analyzer_repeats_is_hidden(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(counters, "snapshot", lambda *_: counters.Snapshot({}, None))
    made = driver(script(tmp_path, f'echo "error: bad header Bearer {KEY}"; exit 3'))
    access = Access.of(headers=[f"Authorization: Bearer {KEY}"])
    target = Target.of("here:8001", None, None, access)
    telling = point.Driver(made.tool, target, made.model, PLAN, "grpc")
    assert KEY in " ".join(telling.command(Load("concurrency", 1), tmp_path, 8, tmp_path))
    (remark,) = telling.run(Load("concurrency", 1), tmp_path, lambda share: None).remarks
    assert "bad header" in remark
    assert KEY not in remark


# ------------------------------------------------------------------ what the server answers


def test_a_key_goes_along_and_its_absence_is_named() -> None:
    with serving({"/v2": [(200, {"name": "triton", "version": "2"})]}) as (address, server):
        assert target_of(address, f"Authorization: Bearer {KEY}").server() == "triton 2"
        assert server.asked[0][1]["authorization"] == f"Bearer {KEY}"
    refusal = (401, {"error": f"what is {KEY}?"})
    asked = {"/v2/models/stats": [refusal], "/v2/models/m/config": [refusal]}
    with serving(asked) as (address, _):
        for name in ("m", None):
            with pytest.raises(InvalidArgumentError, match=r"401.*--api-key-file") as caught:
                target_of(address, f"Authorization: Bearer {KEY}").model(name)
            assert KEY not in str(caught.value)


def test_a_key_is_not_carried_to_another_place() -> None:
    """Neither by a redirection, nor to metrics of another host or, beside TLS, in clear."""
    key = f"Authorization: Bearer {KEY}"
    metrics = {"/metrics": [(200, "jitney_x 1\n")]}
    with serving(metrics) as (other, elsewhere):
        redirect = (307, {}, {"Location": f"http://{other}/metrics"})
        with serving({"/v2": [redirect], **metrics}) as (address, server):
            with pytest.raises(RefusedError, match="does not answer with JSON"):
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


def test_a_proxy_that_is_asked_too_often_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []
    monkeypatch.setattr("jitney.sweep.target.time.sleep", waited.append)
    later: list[Answer] = [
        (429, {"error": "more requests than its limit"}, {"Retry-After": "2"}),
        (503, {"error": "the server is not there"}, {"Retry-After": "soon"}),
        (200, {"name": "triton"}),
    ]
    with serving({"/v2": later}) as (address, server):
        assert target_of(address).server() == "triton"
        assert (waited, len(server.asked)) == ([2.0, 1.0], 3)
    with serving({"/v2": [(429, "no", {"Retry-After": "3600"})]}) as (address, server):
        with pytest.raises(RefusedError, match="answers 429: no"):
            target_of(address).server()
        assert max(waited) <= 5
        assert len(server.asked) == 4


@pytest.mark.parametrize("answer", [[], {}, {"model_stats": [1]}, {"model_stats": None}])
def test_a_server_that_is_none_of_tritons(answer: object) -> None:
    with (
        serving({"/v2/models/stats": [(200, answer)]}) as (address, _),
        pytest.raises(InvalidArgumentError, match="does not answer as Triton does"),
    ):
        target_of(address).model(None)


def test_what_is_no_http_is_said_without_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    def echo(*_: object, **__: object) -> None:
        raise http.client.BadStatusLine(f"got Bearer {KEY}\x1b[31m")

    monkeypatch.setattr("urllib.request.OpenerDirector.open", echo)
    with pytest.raises(UnavailableError, match="cannot be reached") as caught:
        target_of("127.0.0.1:1", f"Authorization: Bearer {KEY}").server()
    assert KEY not in str(caught.value)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("status", [403, 404])
def test_a_server_that_keeps_its_statistics_back(status: int) -> None:
    """The model is found by its name; the measurement goes without the server's counts."""
    back: list[Answer] = [(status, {"error": "no such path"})]
    with serving({"/v2/models/m/config": [(200, CONFIG)], "/v2/models/stats": back}) as (
        address,
        _,
    ):
        target = target_of(address)
        assert target.model("m").max_batch == 8
        with pytest.raises(InvalidArgumentError, match=rf"say which model.*answers {status}"):
            target.model(None)
        with pytest.raises(RefusedError, match="/v2/models/n/config answers 404"):
            target.model("n")
        before = counters.snapshot(target, ["m"], None)
        (missing,) = before.missing
        assert missing.startswith("no statistics of the server (http://")
        assert "answers 404" in missing
        assert counters.stages(before, before) == ()


def test_metrics_that_are_not_published() -> None:
    target = Target.of("proxy:8443", None, None, Access(True))
    with pytest.raises(UnavailableError, match="--metrics-url says where"):
        target.metrics_text()


@pytest.mark.parametrize("answer", ["[]", "{}", '{"model_stats": [{}]}', "no JSON"])
def test_statistics_of_another_form(answer: str) -> None:
    with serving({"/v2/models/m/stats": [(200, answer)]}) as (address, _):
        (missing,) = counters.snapshot(target_of(address), ["m"], None).missing
    assert "statistics" in missing


def test_a_load_says_what_it_goes_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """perf_analyzer asks for statistics itself, and ends without a word of them."""
    monkeypatch.setattr(point, "_PATIENCE_S", 0.2)
    with serving({}) as (address, _):
        made = driver(script(tmp_path, "echo there is no such method here; exit 99"))
        failing = point.Driver(made.tool, target_of(address), made.model, PLAN, "http")
        found = failing.run(Load("concurrency", 1), tmp_path, lambda share: None)
    assert (found.state, found.stages) == ("failed", ())
    assert found.remarks[0].endswith("there is no such method here")
    assert found.remarks[1].endswith("perf_analyzer needs them too")


def test_a_certificate_that_is_not_trusted_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: object, **__: object) -> Callable[..., object]:
        raise ssl.SSLCertVerificationError("certificate verify failed: self-signed certificate")

    monkeypatch.setattr("http.client.HTTPSConnection.connect", failing)
    target = Target.of("127.0.0.1:1", None, None, Access(True))
    with pytest.raises(UnavailableError, match="self-signed certificate"):
        target.server()
