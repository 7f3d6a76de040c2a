"""One engine, its images and one running profile `cpu` for all tests in this folder.

These tests take root, Debian's packages and half an hour on two cores: `make test-compose` runs
them, by naming the folder, and nothing else does.
"""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.compose.engine.deployment import SERVICES, Deployment
from tests.compose.engine.images import make_grafana
from tests.compose.engine.machine import Engine, install
from tests.compose.engine.pip_settings import build_secrets
from tests.compose.engine.project import check_out, document_block
from tests.compose.engine.tight_models import make_repository
from tests.compose.free_ports import free_port


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
    with (
        build_secrets(tmp_path_factory.mktemp("pip")) as secrets,
        Engine(folder, secrets) as engine,
    ):
        engine.import_base()
        yield engine
    if kept is None:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's checkout, with the models built."""
    return check_out(tmp_path_factory.mktemp("user") / "jitney")


@pytest.fixture(scope="session")
def settings(tmp_path_factory: pytest.TempPathFactory, project: Path) -> dict[str, str]:
    """What the tests set otherwise than .env.example does. The profile is no part of it."""
    repository = tmp_path_factory.mktemp("served") / "models"
    make_repository(project / "model_repository", repository)
    return {
        "MODEL_REPOSITORY": str(repository),
        "SERVER_MEMORY": "10g",
        "HTTPS_PORT": str(free_port()),
        "GRAFANA_PORT": str(free_port()),
        "REQUESTS_PER_SECOND": "200",
        "BURST": "300",
        "OPEN_PER_KEY": "300",
        "MAX_BODY": "1m",
        "DRAIN_SECONDS": "20",
    }


@pytest.fixture(scope="session")
def images(
    engine: Engine,
    project: Path,
    settings: dict[str, str],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """The images of profile `cpu`, built by docker-compose, and one in the place of Grafana's."""
    deployment = Deployment(engine, project, {**settings, "COMPOSE_PROFILES": "cpu"})
    deployment.compose("build", timeout_s=2400)
    services = yaml.safe_load((project / "docker-compose.yml").read_text(encoding="utf-8"))
    tag = services["services"]["grafana"]["image"]
    make_grafana(engine, tmp_path_factory.mktemp("grafana"), tag)


@pytest.fixture(scope="session")
def deployment(
    engine: Engine, images: None, project: Path, settings: dict[str, str]
) -> Iterator[Deployment]:
    """Profile `cpu`, brought up with the commands of docs/deploying.md, and healthy."""
    deployment = Deployment(engine, project, {**settings, "COMPOSE_PROFILES": "cpu"})
    try:
        deployment.shell(document_block("docker compose up --build").text, timeout_s=1200)
        with (project / "deploy" / "secrets" / "api_keys").open("a", encoding="utf-8") as keys:
            keys.write("# the second is for the limits\nlimited:" + "L" * 32 + "\n")
        deployment.wait_healthy(*(each for each in SERVICES if each != "grafana"))
        deployment.run_in("proxy", "reload-keys")
        yield deployment
    finally:
        deployment.down()
