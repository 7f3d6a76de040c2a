"""The health check of the server's container, by the engine: one model that is not ready makes it
unhealthy, though the server answers and its other models serve.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.compose.engine.deployment import Deployment, wait_for
from tests.compose.engine.machine import Engine
from tests.compose.engine.tight_models import write_slow_model

_BROKEN = '''"""A model that does not load while this line is here."""

raise RuntimeError("broken on purpose")
'''


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """One model that loads and one that does not."""
    folder = tmp_path / "models"
    for name in ("sound", "broken"):
        write_slow_model(folder / name)
    (folder / "broken" / "1" / "model.py").write_text(_BROKEN, encoding="utf-8")
    return folder


@pytest.fixture
def alone(
    engine: Engine, images: None, project: Path, settings: dict[str, str], repository: Path
) -> Iterator[Deployment]:
    """The server by itself, told to go on without what does not load."""
    own = {
        **settings,
        "COMPOSE_PROFILES": "cpu",
        "COMPOSE_PROJECT_NAME": "jitneyhealth",
        "MODEL_REPOSITORY": str(repository),
        "SERVER_ARGS": "--exit-on-error=false",
        "START_PERIOD": "1s",
    }
    deployment = Deployment(engine, project, own)
    try:
        deployment.compose("up", "--detach", "--no-build", "triton-cpu")
        yield deployment
    finally:
        deployment.down()


def test_a_model_that_is_not_ready_makes_the_container_unhealthy(
    alone: Deployment, repository: Path
) -> None:
    def health() -> str:
        status: str = alone.inspect("triton-cpu")["State"]["Health"]["Status"]
        return status

    def answer() -> str:
        return alone.run_in(
            "triton-cpu", "curl", "-s", "-w", "%{http_code}", "-o", "/dev/null",
            "http://127.0.0.1:8000/v2/models/sound/ready", check=False,
        )  # fmt: skip

    wait_for(lambda: answer() == "200", "the sound model", 60, lambda: alone.logs("triton-cpu"))
    wait_for(lambda: health() == "unhealthy", "the container to be unhealthy", 90)
    said = alone.inspect("triton-cpu")["State"]["Health"]["Log"][-1]
    assert said["ExitCode"] == 1
    assert "broken" in said["Output"]
    assert "sound" not in said["Output"]
    body = {"inputs": [{"name": "x", "shape": [1, 1], "datatype": "FP32", "data": [2]}]}
    served = alone.run_in(
        "triton-cpu", "curl", "-s", "-d", json.dumps(body),
        "http://127.0.0.1:8000/v2/models/sound/infer",
    )  # fmt: skip
    assert json.loads(served)["outputs"][0]["data"] == [2.0]

    write_slow_model(repository / "broken")
    alone.compose("restart", "triton-cpu")
    alone.wait_healthy("triton-cpu", timeout_s=90)


def test_without_that_setting_it_stops_the_start_and_is_tried_again(
    alone: Deployment, repository: Path
) -> None:
    alone.settings.pop("SERVER_ARGS")
    alone.compose("up", "--detach", "--no-build", "triton-cpu")
    wait_for(
        lambda: alone.inspect("triton-cpu")["RestartCount"] >= 2,
        "the engine to try again",
        90,
        lambda: alone.logs("triton-cpu"),
    )
    assert "broken on purpose" in alone.logs("triton-cpu")
    write_slow_model(repository / "broken")
    alone.wait_healthy("triton-cpu", timeout_s=120)
