"""One scratch copy for all pages. `make test-docs` runs these by naming the folder; nothing else
does."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.run.scratch import environment, make_scratch
from tests.docs.run.serving import Server
from tests.docs.run.shell import PageShell


def pytest_ignore_collect(config: pytest.Config) -> bool | None:
    """Leave these tests out of runs that do not name their folder."""
    here = Path(__file__).parent
    start = config.invocation_params.dir
    given = [Path(start, str(arg).split("::")[0]) for arg in config.invocation_params.args]
    named = any(path.exists() and path.resolve().is_relative_to(here) for path in given)
    return None if named else True


@pytest.fixture(scope="session")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The copy, which all pages share, as a reader's checkout would be."""
    folder = tmp_path_factory.mktemp("docs") / "checkout"
    folder.mkdir()
    return make_scratch(folder)


@pytest.fixture(scope="session")
def variables(scratch: Path) -> dict[str, str]:
    return environment(scratch)


@pytest.fixture(scope="session")
def server(scratch: Path, variables: dict[str, str]) -> Iterator[Server]:
    """Not started before a page asks for it."""
    server = Server(scratch, variables)
    yield server
    server.stop()


@pytest.fixture
def shell(scratch: Path, variables: dict[str, str], tmp_path: Path) -> Iterator[PageShell]:
    shell = PageShell(scratch, variables, tmp_path / "state")
    yield shell
    shell.close()
