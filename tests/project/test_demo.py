"""`make demo` is a test too: it ends with status 0 only if everything it shows happened."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.http_server import Quiet, listening

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))


@pytest.mark.slow
@pytest.mark.server
def test_demo(tmp_path: Path) -> None:
    log = tmp_path / "log"
    built = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "build_models.py")],
        capture_output=True,
        check=False,
    )
    result = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "demo.py"), "--log-file", str(log)],
        capture_output=True,
        text=True,
        timeout=900,
        env={**os.environ, "COLUMNS": "100"},
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    text = result.stdout
    assert "Triton Inference Server is up" in text
    assert len(re.findall(r"\d joins \(gRPC", text)) == 6
    assert len(re.findall(r"\d joins \(HTTP", text)) == 6
    assert len(re.findall(r"ends after \d+ tokens", text)) == 12
    assert int(re.findall(r"running at once +up to (\d+)", text)[0]) >= 2
    mean = float(re.findall(r"with ([\d.]+) sequences each", text)[0])
    assert mean > 1.0, "by the server's own metrics too, steps were shared"
    assert "stopped cleanly" in text
    if built.returncode == 3:  # the libraries for an export are missing: it goes on without
        assert "Left out, the models beside the language model" in text
    else:
        assert built.returncode == 0, built.stderr.decode()
        assert "drawn: a 5" in text
        executions = re.findall(r"256 requests, run in (\d+) executions", text)
        assert len(executions) == 2
        assert all(int(count) < 256 for count in executions)
        assert "rows    400 of 400: 400 written, 0 bad" in text
        assert re.search(r"cost    [\d.]+ s .* [\d.,]+ core-seconds a thousand rows", text)
    assert "Traceback" not in log.read_text(encoding="utf-8")


@pytest.mark.usefixtures("scripts")
def test_what_makes_the_demo_fail() -> None:
    import demo
    from demo_requests import make_requests

    requests = make_requests()
    for request in requests:
        request.sent, request.tokens, request.ended = 0.0, [(1.0, 2)], 2.0
    demo.check(requests)
    requests[3].error = "gone"
    with pytest.raises(demo.DemoError, match="request 4: gone"):
        demo.check(requests)
    requests[3].error = ""
    requests[4].tokens = []
    with pytest.raises(demo.DemoError, match="request 5 brought 0 tokens"):
        demo.check(requests)
    for number, request in enumerate(requests):
        request.tokens, request.ended = [(float(number), 1)], number + 0.5
    with pytest.raises(demo.DemoError, match="no two requests"):
        demo.check(requests)


@pytest.mark.usefixtures("scripts")
@pytest.mark.parametrize("reason", ["None", "length"])
def test_an_answer_over_http_without_a_finish_reason_is_an_error(reason: str) -> None:
    """The server may end one in good order that it has cut off."""
    import demo_requests

    class Server(Quiet):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.end_headers()
            event = {"text_output": "a", "num_output_tokens": 1, "num_input_tokens": 2}
            text = json.dumps({**event, "finish_reason": reason})
            self.wfile.write(f"data: {text}\n\n".encode())

    request = demo_requests.DemoRequest(1, "HTTP", "def", 9)
    with listening(Server) as url:
        demo_requests.send(request, "", url)
    assert request.made == 1
    assert request.error == ("the answer broke off" if reason == "None" else "")
