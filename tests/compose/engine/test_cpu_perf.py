"""Profile `perf`, run by a real engine: the sweep as docs/deploying.md has it, by a real
`perf_analyzer`, against the server of profile `cpu` on the inner network. The image below it has
NVIDIA's layout, not its content.
"""

import pytest
from jitney_measure import record

from tests.compose.engine.deployment import Deployment
from tests.compose.engine.images import make_sdk
from tests.compose.engine.machine import Engine
from tests.compose.engine.project import document_block

ARGUMENTS = "pylm --concurrency 1,2 --seconds 3 --input-tokens 16 --output-tokens 16"


@pytest.fixture(scope="module")
def perf(
    engine: Engine, deployment: Deployment, tmp_path_factory: pytest.TempPathFactory
) -> Deployment:
    """The same deployment, with the setting of what is measured."""
    make_sdk(engine, tmp_path_factory.mktemp("sdk"))
    settings = {**deployment.settings, "SWEEP_ARGS": ARGUMENTS}
    return Deployment(engine, deployment.project, settings)


def test_the_sweep_measures_the_service_and_its_report_comes_out(perf: Deployment) -> None:
    perf.shell(document_block("--profile perf run").text, timeout_s=1200)
    result = record.read(perf.project / "reports" / "result.json")
    assert [point.load.level for point in result.points] == [1, 2]
    assert "failed" not in {point.state for point in result.points}
    report = (perf.project / "reports" / "report.html").read_text(encoding="utf-8")
    assert "pylm" in report


def test_the_image_has_no_more_than_it_needs(perf: Deployment) -> None:
    """No torch; and the sweep needs neither a writable root nor a network to say what it can."""
    said = perf.engine.docker(
        "run", "--rm", "--network=none", "--read-only", "--tmpfs=/tmp", "jitney/perf:local",
        "python3", "-m", "benchmarks.sweep", "--help",
    ).stdout  # fmt: skip
    assert "--slo" in said
    program = "import importlib.util; print(importlib.util.find_spec('torch'))"
    found = perf.engine.docker(
        "run", "--rm", "--network=none", "jitney/perf:local", "python3", "-c", program
    ).stdout
    assert found.splitlines()[-1] == "None"
