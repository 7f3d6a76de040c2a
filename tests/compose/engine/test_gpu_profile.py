"""Profile `gpu`, as far as a machine goes that has neither a GPU nor NVIDIA's images: the
configuration, the project's Dockerfile on a stand-in with the same layout,
process 1 in its native form, and the model repository against it. Left out are the images' own
content, the reservation of GPUs, and what runs on them.
"""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.compose.engine.deployment import Deployment
from tests.compose.engine.images import make_server
from tests.compose.engine.machine import Engine
from tests.compose.free_ports import free_port

LEFT_OUT = "GPUs and pinned memory, which this machine has none of and no right to"


@pytest.fixture(scope="module")
def gpu_settings(settings: dict[str, str]) -> dict[str, str]:
    """A deployment beside the one of profile `cpu`."""
    return {
        **settings,
        "COMPOSE_PROFILES": "gpu",
        "COMPOSE_PROJECT_NAME": "jitneygpu",
        "HTTPS_PORT": str(free_port()),
        "GRAFANA_PORT": str(free_port()),
    }


def in_profile(made: dict[str, Any], profile: str) -> set[str]:
    """Names of a profile's services: `config` shows those of the others too."""
    return {name for name, each in made["services"].items() if profile in each["profiles"]}


def resolved(engine: Engine, project: Path, settings: dict[str, str]) -> dict[str, Any]:
    """docker-compose.yml with everything filled in, as docker-compose itself says."""
    made: dict[str, Any] = yaml.safe_load(Deployment(engine, project, settings).compose("config"))
    return made


def test_the_configuration_reserves_the_gpus_and_shuts_the_server_in(
    engine: Engine, project: Path, gpu_settings: dict[str, str]
) -> None:
    made = resolved(engine, project, gpu_settings)
    assert in_profile(made, "gpu") == {
        *("triton", "gateway", "proxy", "prometheus", "prober", "disks", "grafana"),
    }
    triton = made["services"]["triton"]
    (device,) = triton["deploy"]["resources"]["reservations"]["devices"]
    assert (device["driver"], device["capabilities"]) == ("nvidia", ["gpu"])
    assert device["count"] in (-1, "all")
    assert list(triton["networks"]) == ["inner"]
    assert made["networks"]["inner"]["internal"] is True
    assert "ports" not in triton
    assert triton["ulimits"]["memlock"] == -1
    assert any(volume.endswith(":/models:ro") for volume in triton["volumes"])
    # What the profiles have in common is said once in the file; here it has arrived in this one.
    cpu = made["services"]["triton-cpu"]
    for key in ("command", "healthcheck", "shm_size", "mem_limit", "stop_grace_period", "restart",
                "read_only", "cap_drop", "security_opt", "logging", "tmpfs"):  # fmt: skip
        assert triton[key] == cpu[key]


def test_the_sweep_is_in_a_profile_of_its_own(
    engine: Engine, project: Path, gpu_settings: dict[str, str]
) -> None:
    made = resolved(engine, project, {**gpu_settings, "COMPOSE_PROFILES": "perf"})
    assert in_profile(made, "perf") == {"perf"}
    assert list(made["services"]["perf"]["networks"]) == ["inner"]


@pytest.fixture(scope="module")
def gpu_deployment(
    engine: Engine,
    images: None,
    project: Path,
    gpu_settings: dict[str, str],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Deployment]:
    """Profile `gpu` on a stand-in for NVIDIA's image, with what LEFT_OUT names taken away."""
    make_server(engine, tmp_path_factory.mktemp("nvidia"))
    whole = Deployment(engine, project, gpu_settings)
    whole.shell("deploy/secrets.sh")
    whole.compose("build", "triton", timeout_s=2400)
    made = resolved(engine, project, gpu_settings)
    del made["services"]["triton"]["deploy"]
    del made["services"]["triton"]["ulimits"]["memlock"]
    file = project / "without-gpu.yml"
    file.write_text(yaml.safe_dump(made), encoding="utf-8")
    deployment = Deployment(engine, project, {**gpu_settings, "COMPOSE_FILE": file.name})
    try:
        deployment.compose("up", "--detach", "--no-build", "triton", "proxy")
        deployment.wait_healthy("triton", "proxy")
        yield deployment
    finally:
        deployment.down()


def test_the_image_serves_the_repository(gpu_deployment: Deployment) -> None:
    client = gpu_deployment.client()
    assert client.stream(32)[-1][1]["finish_reason"] == "length"
    assert len(client.embed("the same repository")) == 384
    config = json.loads(client.request("GET", "/v2/models/minilm/config")[2])
    assert config["backend"] == "onnxruntime"
    assert gpu_deployment.client("").request("GET", "/v2")[0] == 401


def test_the_package_is_beside_the_images_own_numpy(gpu_deployment: Deployment) -> None:
    program = "import jitney, numpy, torch, triton, torchao; print(jitney.__file__, numpy.__file__)"
    where = gpu_deployment.run_in("triton", "python3", "-c", program).split()
    assert where[0].startswith("/opt/jitney/")
    assert where[1].startswith("/usr/local/lib/python3.11/dist-packages/")
    compiler = gpu_deployment.run_in("triton", "gcc", "--version")
    assert "Free Software Foundation" in compiler
    mine = gpu_deployment.run_in("triton", "ls", "/opt/tritonserver/backends").split()
    assert {"jitney", "onnxruntime", "python"} <= set(mine)


def test_docker_stop_drains_and_ends_with_0(gpu_deployment: Deployment) -> None:
    client = gpu_deployment.client()
    idle = client.grpc()
    idle.start_stream(lambda result, error: None, headers=client.headers)
    began = time.monotonic()
    gpu_deployment.compose("stop", timeout_s=120)
    idle.close()
    assert gpu_deployment.inspect("triton")["State"]["ExitCode"] == 0, gpu_deployment.logs("triton")
    assert time.monotonic() - began < 45
