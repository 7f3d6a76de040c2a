"""One engine, its images and one running profile `cpu` for all tests in this folder.

These tests take root, Debian's packages and some twenty minutes: `make test-compose` runs them, by
naming the folder, and nothing else does.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.compose.engine.deployment import Deployment
from tests.compose.engine.machine import ROOT, Engine, install
from tests.compose.engine.pip_settings import build_secrets
from tests.compose.engine.tight_models import make_repository
from tests.compose.free_ports import free_port

CPU_IMAGES = ("triton-cpu", "proxy", "prometheus")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Only known where this folder is named on the command line."""
    parser.addoption(
        "--engine-folder",
        type=Path,
        help="keep the engine's images here, for the next run to build on",
    )


def pytest_ignore_collect(config: pytest.Config) -> bool | None:
    """Leave these tests out of runs that do not name their folder."""
    return None if named(config) else True


def named(config: pytest.Config) -> bool:
    """Whether the command line names this folder or a file in it."""
    here = Path(__file__).parent
    start = config.invocation_params.dir
    given = [Path(start, str(arg).split("::")[0]) for arg in config.invocation_params.args]
    return any(path.exists() and path.resolve().is_relative_to(here) for path in given)


@pytest.fixture(scope="session")
def engine(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    """A running engine with the base image."""
    if os.geteuid() != 0:
        pytest.skip("a container engine can only be started by root")
    install()
    kept = request.config.getoption("--engine-folder")
    folder = kept or tmp_path_factory.mktemp("engine")
    with Engine(folder) as engine:
        engine.import_base()
        yield engine
    if kept is None:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def pip_secrets(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """What lets a build reach the package index as this machine does."""
    with build_secrets(tmp_path_factory.mktemp("pip")) as secrets:
        yield secrets


@pytest.fixture(scope="session")
def images(engine: Engine, pip_secrets: list[str]) -> None:
    """The images of profile `cpu`, but for Grafana's."""
    for target in CPU_IMAGES:
        engine.build("deploy/Dockerfile", target, f"jitney/{target}:test", pip_secrets)


@pytest.fixture(scope="session")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model repository that is served."""
    subprocess.run([sys.executable, ROOT / "scripts" / "build_models.py"], check=True)
    # Beside pytest's folders, which keep other users out: the containers' user must get in.
    folder = tmp_path_factory.getbasetemp()
    target = folder / "models"
    make_repository(ROOT / "model_repository", target)
    return target


@pytest.fixture(scope="session")
def settings(tmp_path_factory: pytest.TempPathFactory, repository: Path) -> dict[str, str]:
    """The settings that tests have in common, secrets made by the project's own script."""
    secrets = tmp_path_factory.mktemp("secrets")
    subprocess.run(
        [ROOT / "deploy" / "secrets.sh"], env={**os.environ, "SECRETS": str(secrets)}, check=True
    )
    with (secrets / "api_keys").open("a", encoding="utf-8") as keys:
        keys.write("# the second is for the limits\nlimited:" + "L" * 32 + "\n")
    return {
        "COMPOSE_PROFILES": "cpu",
        "COMPOSE_PROJECT_NAME": "jitneytest",
        "JITNEY_TAG": "test",
        "MODEL_REPOSITORY": str(repository),
        "SECRETS": str(secrets),
        "SERVER_MEMORY": "10g",
        "HTTPS_PORT": str(free_port()),
        "GRAFANA_PORT": str(free_port()),
        "REQUESTS_PER_SECOND": "200",
        "BURST": "300",
        "OPEN_PER_KEY": "300",
        "MAX_BODY": "1m",
        "DRAIN_SECONDS": "20",
    }


@pytest.fixture(scope="module")
def deployment(
    engine: Engine, images: None, settings: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Deployment]:
    """Profile `cpu`, up and healthy. Grafana's image is not to be had here: its proxy's port then
    answers 502."""
    deployment = Deployment(engine, settings, tmp_path_factory.mktemp("deployment"))
    try:
        deployment.up("triton-cpu", "proxy", "prometheus", "prober")
        deployment.wait_healthy("triton-cpu", "proxy", "prometheus", "prober")
        yield deployment
    finally:
        deployment.down()
