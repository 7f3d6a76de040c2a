"""Profile `gpu` and the image of the sweep, as far as a machine goes that has neither a GPU nor
NVIDIA's images: the configuration, the project's Dockerfile on stand-ins with the same layout,
process 1 in its native form, and the model repository against it. Left out are the images' own
content, the reservation of GPUs, and what runs on them.
"""

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.compose.engine.deployment import Deployment
from tests.compose.engine.machine import ROOT, Engine
from tests.compose.free_ports import free_port

# NVIDIA's layout out of the embedded server's parts: the server in /opt/tritonserver, the system's
# Python with a numpy that is to stay, and its own backends, among them an ONNX Runtime.
_SERVER = """
FROM jitney/triton-cpu:test AS parts
FROM debian:bookworm-slim
RUN apt-get update && apt-get install -y --no-install-recommends python3 libpython3.11
COPY --from=parts /opt/jitney/lib/python3.11/site-packages /parts
RUN cp -r /parts/pytriton/tritonserver /opt/tritonserver \
    && cp /opt/tritonserver/python_backend_stubs/3.11/triton_python_backend_stub \
        /opt/tritonserver/backends/python/ \
    && chmod 755 /opt/tritonserver/backends/python/triton_python_backend_stub \
    && cp -r /parts/nvidia_pytriton.libs /opt/tritonserver/lib \
    && cp -r /parts/jitney_backends/onnxruntime /opt/tritonserver/backends/ \
    && cp -r /parts/numpy* /parts/onnxruntime* /usr/local/lib/python3.11/dist-packages/ \
    && rm -r /parts
ENV LD_LIBRARY_PATH=/opt/tritonserver/lib
"""
_SDK = "FROM debian:bookworm-slim\nRUN apt-get update && apt-get install -y python3-minimal\n"
LEFT_OUT = "GPUs and pinned memory, which this machine has none of and no right to"


@pytest.fixture(scope="module")
def gpu_images(
    engine: Engine, images: None, pip_secrets: list[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The stand-ins under NVIDIA's names, and on them what deploy/triton.Dockerfile makes."""
    text = (ROOT / "deploy" / "triton.Dockerfile").read_text(encoding="utf-8")
    release = next(line for line in text.splitlines() if line.startswith("ARG RELEASE="))[12:]
    folder = tmp_path_factory.mktemp("nvidia")
    for content, flavour in ((_SERVER, "py3"), (_SDK, "py3-sdk")):
        file = folder / f"{flavour}.Dockerfile"
        file.write_text(content, encoding="utf-8")
        engine.docker(
            "build", "--network=host", f"--file={file}",
            f"--tag=nvcr.io/nvidia/tritonserver:{release}-{flavour}", str(folder),
            timeout_s=900,
        )  # fmt: skip
    for target in ("triton", "perf"):
        engine.build("deploy/triton.Dockerfile", target, f"jitney/{target}:test", pip_secrets)


def resolved(engine: Engine, settings: dict[str, str], folder: Path, profile: str) -> dict:
    """docker-compose.yml with everything filled in, as docker-compose itself says."""
    deployment = Deployment(engine, {**settings, "COMPOSE_PROFILES": profile}, folder)
    made: dict = yaml.safe_load(deployment.compose("config"))
    return made


def test_the_configuration_reserves_the_gpus_and_shuts_the_server_in(
    engine: Engine, settings: dict[str, str], tmp_path: Path
) -> None:
    made = resolved(engine, settings, tmp_path, "gpu")
    assert set(made["services"]) >= {"triton", "proxy", "prometheus", "prober", "grafana"}
    triton = made["services"]["triton"]
    (device,) = triton["deploy"]["resources"]["reservations"]["devices"]
    assert (device["driver"], device["capabilities"]) == ("nvidia", ["gpu"])
    assert device["count"] in (-1, "all")
    assert list(triton["networks"]) == ["inner"]
    assert made["networks"]["inner"]["internal"] is True
    assert "ports" not in triton
    assert triton["ulimits"]["memlock"] == -1
    assert any(volume.endswith(":/models:ro") for volume in triton["volumes"])


def test_the_sweep_is_in_a_profile_of_its_own(
    engine: Engine, settings: dict[str, str], tmp_path: Path
) -> None:
    made = resolved(engine, settings, tmp_path, "perf")
    assert list(made["services"]["perf"]["networks"]) == ["inner"]
    assert "reports:/reports:rw" in made["services"]["perf"]["volumes"]


@pytest.fixture(scope="module")
def gpu_deployment(
    engine: Engine,
    gpu_images: None,
    settings: dict[str, str],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Deployment]:
    """Profile `gpu` with what LEFT_OUT names taken away."""
    folder = tmp_path_factory.mktemp("gpu")
    own = {
        **settings,
        "COMPOSE_PROFILES": "gpu",
        "COMPOSE_PROJECT_NAME": "jitneygpu",
        "HTTPS_PORT": str(free_port()),
        "GRAFANA_PORT": str(free_port()),
    }
    made = resolved(engine, own, folder, "gpu")
    del made["services"]["triton"]["deploy"]
    del made["services"]["triton"]["ulimits"]["memlock"]
    file = folder / "without-gpu.yml"
    file.write_text(yaml.safe_dump(made), encoding="utf-8")
    deployment = Deployment(engine, own, folder, file)
    try:
        deployment.up("triton", "proxy")
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


def test_nobody_may_change_models(gpu_deployment: Deployment) -> None:
    path = "/v2/repository/models/pylm/unload"
    status = gpu_deployment.run_in(
        "triton", "curl", "-s", "-o", "/dev/null", "-w", "%{http_code}", "-d", "{}",
        f"http://127.0.0.1:8000{path}",
    )  # fmt: skip
    assert status == "403"


def test_the_image_of_the_sweep_has_what_it_imports(engine: Engine, gpu_images: None) -> None:
    program = "import benchmarks, matplotlib, numpy, rich, typer"
    engine.docker(
        "run", "--rm", "--network=none", "--read-only", "--tmpfs=/tmp", "jitney/perf:test",
        "python3", "-c", program,
    )  # fmt: skip


def test_docker_stop_drains_and_ends_with_0(gpu_deployment: Deployment) -> None:
    client = gpu_deployment.client()
    idle = client.grpc()
    idle.start_stream(lambda result, error: None, headers=client.headers)
    began = time.monotonic()
    gpu_deployment.compose("stop", timeout_s=120)
    idle.close()
    assert gpu_deployment.inspect("triton")["State"]["ExitCode"] == 0, gpu_deployment.logs("triton")
    assert time.monotonic() - began < 45
