"""The report of a sweep that really took place: the command, perf_analyzer, the real server."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from jitney.server import TritonServer
from jitney.sweep import record

from tests.browser.conftest import Look
from tests.browser.test_browser_report import LANGUAGE, best_rows
from tests.browser.view import cut_off, missing

pytestmark = [pytest.mark.browser, pytest.mark.server]

ROOT = Path(__file__).resolve().parents[2]
MODEL = "pylm"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `jitney bench` left."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "scripts"))
        from fetch_perf_analyzer import FetchError, fetch

        try:
            fetch()
        except FetchError as error:
            pytest.skip(f"perf_analyzer cannot be fetched on this machine: {error}")
    out = tmp_path_factory.mktemp("sweep")
    with TritonServer(ROOT / "model_repository", models=[MODEL]) as server:
        where = ("--url", server.grpc_url, "--http-url", server.http_url)
        loads = ("--concurrency", "1,4", "--rate", "10", "--requests", "16")
        lengths = ("--input-tokens", "32", "--output-tokens", "8:16", "--slo", "ttft-p95=30s")
        done = subprocess.run(
            [Path(sys.executable).parent / "jitney", "bench", MODEL, *where, *loads, *lengths,
             "--metrics-url", server.metrics_url, "--out", str(out)],
            env={**os.environ, "NO_COLOR": "1"}, capture_output=True, text=True, timeout=300,
            check=False,
        )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return out


def test_its_report(folder: Path, look: Look, screenshots: Path | None) -> None:
    result = record.read(folder / "result.json")
    assert len(result.points) == 3
    view = look(folder / "report.html")
    if screenshots is not None:
        view.screenshot(screenshots / "sweep.png")
    assert view.said() == []
    shown = view.page.locator("figure").evaluate_all("all => all.map(e => e.id)")
    assert missing(shown, LANGUAGE) == []
    assert view.undrawn() == []
    assert view.names() == []
    assert view.contrast() == []
    assert view.overflow() == []
    assert best_rows(view, result) == []
    assert [name for name in LANGUAGE if cut_off((folder / f"{name}.png").read_bytes())] == []
