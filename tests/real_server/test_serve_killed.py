"""What is left of ``jitney serve`` when it is killed."""

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.real_server.conftest import write_model


@pytest.mark.slow
def test_a_killed_launcher_leaves_no_process(tmp_path: Path, checkpoint: Path) -> None:
    """Neither the server, nor the front and its engine, nor the gateway."""
    write_model(tmp_path / "models", "tiny", {"model": str(checkpoint), "threads": 1})
    jitney = str(Path(sys.executable).parent / "jitney")
    ports = [f"--{name}-port=0" for name in ("http", "grpc", "metrics", "openai")]
    command = [jitney, "serve", str(tmp_path / "models"), *ports]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as serve:
        assert serve.stdout is not None
        assert any("OpenAI" in line for line in serve.stdout)  # the last one, once all is up
        children = psutil.Process(serve.pid).children(recursive=True)
        assert {"tritonserver", "triton_python_b"} <= {each.name()[:15] for each in children}
        serve.kill()
        try:
            assert psutil.wait_procs(children, 60)[1] == []
        finally:
            for each in children:
                if each.is_running():
                    each.kill()
