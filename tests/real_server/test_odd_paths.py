"""A server whose folders have a space and a letter like ü in their paths, from start to stop."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from tests.real_server.conftest import write_model

JITNEY = str(Path(sys.executable).parent / "jitney")


@pytest.mark.slow
@pytest.mark.parametrize("locale", ["C.UTF-8", "C"])
def test_spaces_and_letters_in_every_path(tmp_path: Path, checkpoint: Path, locale: str) -> None:
    """Of the repository, the checkpoint in it, the log, and the folders for temporary files and
    caches."""
    odd = tmp_path / "a b" / "m\u00fcll (1)"
    temporary = odd / "t"
    home = odd / "home"
    temporary.mkdir(parents=True)
    home.mkdir()
    repository = odd / "models"
    write_model(repository, "tiny", {"model": "w\u00e4ights 1", "threads": 1, "adapters": "loras"})
    shutil.copytree(checkpoint, repository / "tiny" / "1" / "w\u00e4ights 1")
    (repository / "tiny" / "1" / "loras").mkdir()
    log = odd / "log of \u00fc"
    environment = {
        **os.environ,
        "LC_ALL": locale,
        "TMPDIR": str(temporary),
        "HOME": str(home),
        "XDG_CACHE_HOME": str(home / "c\u00e4che"),
    }
    ports = [f"--{name}-port=0" for name in ("http", "grpc", "metrics")]
    command = [JITNEY, "serve", str(repository), *ports, f"--log-file={log}"]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=environment,
        start_new_session=True,
    ) as serve:
        try:
            assert serve.stdout is not None
            address = ""
            printed = b""
            for line in serve.stdout:
                printed += line
                found = re.search(rb"HTTP +(http://\S+)", line)
                address = found[1].decode() if found else address
                if b"Ctrl-C stops" in line:
                    break
            assert address, printed.decode(errors="replace")
            body = {"text_input": "the bus", "max_tokens": 4, "ignore_eos": True}
            request = urllib.request.Request(
                f"{address}/v2/models/tiny/generate",
                json.dumps(body).encode(),
                {"Content-Type": "application/json"},
            )
            with urllib.request.urlopen(request, timeout=120) as answer:
                assert json.loads(answer.read())["text_output"].startswith("the bus")
            assert log.stat().st_size > 0
            serve.send_signal(signal.SIGTERM)
            assert serve.wait(120) == 0
        finally:
            serve.kill()
