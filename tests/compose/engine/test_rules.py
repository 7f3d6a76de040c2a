"""Prometheus' own checks of its configuration and rules, by Debian's promtool."""

import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.compose.engine.machine import install
from tests.compose.monitoring import (
    FIRED_BY_A_KILL,
    FIRED_BY_LOAD,
    NOT_FIRED,
    RULES,
    alerts,
)

HERE = Path(__file__).resolve().parent
CASES = HERE.parent / "alerts_test.yml"


# Query of the dashboard about GPUs -> what it gives for the two of GPU_SERIES.
@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The configuration as in the container, but for the folder that its files are in."""
    install()
    for file in RULES.parent.iterdir():
        text = file.read_text(encoding="utf-8").replace("/etc/jitney/", "")
        (tmp_path / file.name).write_text(text, encoding="utf-8")
    shutil.copy(CASES, tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "command",
    [
        ("check", "config", "prometheus.yml"),
        ("check", "rules", "alerts.yml"),
        ("test", "rules", CASES.name),
    ],
    ids=lambda command: " ".join(command[:2]),
)
def test_promtool_finds_nothing_wrong(folder: Path, command: tuple[str, ...]) -> None:
    done = subprocess.run(
        ["promtool", *command], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_is_shown_to_fire_and_not_to() -> None:
    cases = yaml.safe_load(CASES.read_text(encoding="utf-8"))["tests"]
    seen: dict[str, set[bool]] = {}
    for case in (each for test in cases for each in test["alert_rule_test"]):
        seen.setdefault(case["alertname"], set()).add(bool(case["exp_alerts"]))
    assert seen == {name: {True, False} for name in alerts()}


def test_every_alert_is_brought_about_on_the_server_or_it_is_said_why_not() -> None:
    kinds = [set(FIRED_BY_LOAD), FIRED_BY_A_KILL, set(NOT_FIRED)]
    assert set.union(*kinds) == set(alerts())
    assert sum(map(len, kinds)) == len(alerts())
    assert all(NOT_FIRED.values())
