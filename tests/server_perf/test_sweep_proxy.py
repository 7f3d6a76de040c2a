"""A sweep through the proxy of docker-compose: TLS and a key, which nothing shows afterwards."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from jitney_measure import record
from jitney_server.server import TritonServer

from tests.compose.proxy import Proxy, Server

pytestmark = [
    pytest.mark.server,
    pytest.mark.usefixtures("binary"),
    pytest.mark.slow,  # half a minute of computing: a server, six sweeps, as many interpreters
    pytest.mark.debian,
    pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificate"),
]

ROOT = Path(__file__).resolve().parents[2]
MODEL = "pylm"
JITNEY = Path(sys.executable).parent / "jitney"


def behind(server: TritonServer) -> Server:
    """The real server, at the place of the one that those tests have."""
    http, grpc = (int(url.rpartition(":")[2]) for url in (server.http_url, server.grpc_url))
    return Server(http_port=http, grpc_port=grpc)


@pytest.fixture(scope="module")
def front(server: TritonServer) -> Iterator[Proxy]:
    with Proxy(behind(server)) as running:
        yield running


def options(front: Proxy, keys: Path | None = None) -> list[str]:
    """What `jitney bench` is told of it."""
    access = ["--ca-file", str(front.secrets / "tls_certificate")]
    given = ["--api-key-file", str(keys or front.secrets / "api_keys")]
    return ["--url", f"localhost:{front.port}", *access, *given]


def bench(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [JITNEY, "bench", *words],
        env={**os.environ, "COLUMNS": "300", "NO_COLOR": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def check_no_key(front: Proxy, done: subprocess.CompletedProcess[str], out: Path) -> None:
    key = front.keys().split(":")[-1].strip()
    assert len(key) > 20
    assert key not in done.stdout + done.stderr
    for path in out.rglob("*"):
        assert key.encode() not in path.read_bytes(), path


def test_a_language_model_over_grpc(front: Proxy, tmp_path: Path) -> None:
    done = bench(
        MODEL, *options(front), "--concurrency", "2", "--requests", "8",
        "--input-tokens", "40", "--output-tokens", "8", "--out", str(tmp_path),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    (point,) = record.read(tmp_path / "result.json").points
    assert point.measured is not None, point.remarks
    assert (point.measured.requests, point.measured.failed) == (8, 0)
    assert point.measured.output_tokens == 8 * 8
    assert point.measured.input_tokens_mean == pytest.approx(40, rel=0.25), "it could be asked"
    assert point.stages[0].inferences == 8, "statistics come through"
    assert point.engine is None
    assert any("--metrics-url says where" in remark for remark in point.remarks)
    check_no_key(front, done, tmp_path)


def test_without_a_key_or_the_certificate(front: Proxy, tmp_path: Path) -> None:
    """One line that says what is missing."""
    keyless = bench(MODEL, *options(front)[:4])
    assert keyless.returncode == 1
    assert "answers 401" in keyless.stderr
    assert "--api-key-file" in keyless.stderr
    strange = bench(MODEL, *options(front)[:2], "--tls", *options(front)[4:])
    assert strange.returncode == 1
    assert "CERTIFICATE_VERIFY_FAILED" in strange.stderr
    (tmp_path / "wrong").write_text(f"somebody:{'x' * 30}\n", encoding="utf-8")
    wrong = bench(MODEL, *options(front, tmp_path / "wrong"))
    assert wrong.returncode == 1
    assert "answers 401" in wrong.stderr
    assert "x" * 30 not in wrong.stdout + wrong.stderr


def test_a_proxy_that_keeps_statistics_back(server: TritonServer, tmp_path: Path) -> None:
    """perf_analyzer cannot do without; it is said what is missing."""
    with Proxy(behind(server), kept_back="stat") as front:
        done = bench(
            MODEL, *options(front), "--concurrency", "2", "--requests", "8",
            "--out", str(tmp_path / "out"),
        )  # fmt: skip
        assert done.returncode == 1
        assert f"/v2/models/{MODEL}/stats answers 404" in done.stdout
        assert "perf_analyzer needs them too" in done.stdout
        assert (tmp_path / "out/report.html").exists()
        check_no_key(front, done, tmp_path / "out")
        unnamed = bench(*options(front))
        assert unnamed.returncode == 1
        assert "say which model" in unnamed.stderr
