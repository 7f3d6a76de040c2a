"""Prometheus' own checks of its configuration and rules, by Debian's promtool; and what the
dashboard asks about GPUs, over series that a server with two of them has.
"""

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
    dashboard_queries,
    needs_gpu,
)

HERE = Path(__file__).resolve().parent
CASES = HERE.parent / "alerts_test.yml"
# Query of the dashboard about GPUs -> what it gives for the two of GPU_SERIES.
GPU_SERIES = {
    'nv_gpu_utilization{gpu_uuid="GPU-1"}': 0.5,
    'nv_gpu_utilization{gpu_uuid="GPU-2"}': 0.75,
    'nv_gpu_memory_used_bytes{gpu_uuid="GPU-1"}': 20e9,
    'nv_gpu_memory_used_bytes{gpu_uuid="GPU-2"}': 60e9,
    'nv_gpu_memory_total_bytes{gpu_uuid="GPU-1"}': 80e9,
    'nv_gpu_memory_total_bytes{gpu_uuid="GPU-2"}': 80e9,
    'nv_gpu_power_usage{gpu_uuid="GPU-1"}': 350,
    'nv_gpu_power_usage{gpu_uuid="GPU-2"}': 175,
    'nv_gpu_power_limit{gpu_uuid="GPU-1"}': 700,
    'nv_gpu_power_limit{gpu_uuid="GPU-2"}': 700,
}
GPU_ANSWERS = {
    "nv_gpu_utilization": (0.5, 0.75),
    "nv_gpu_memory_used_bytes / nv_gpu_memory_total_bytes": (0.25, 0.75),
    "nv_gpu_power_usage / nv_gpu_power_limit": (0.5, 0.25),
}


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


def test_every_query_about_gpus_is_evaluated_over_series_of_two(tmp_path: Path) -> None:
    install()
    asked = [query for _, query in dashboard_queries("1m", ".*") if needs_gpu(query)]
    assert set(asked) == set(GPU_ANSWERS)
    checks = []
    for query in asked:
        name = query if "/" not in query else ""
        labels = [f'{name}{{gpu_uuid="GPU-{number}"}}' for number in (1, 2)]
        samples = [
            {"labels": label, "value": value}
            for label, value in zip(labels, GPU_ANSWERS[query], strict=True)
        ]
        checks.append({"expr": query, "eval_time": "5m", "exp_samples": samples})
    series = [{"series": name, "values": f"{value}x40"} for name, value in GPU_SERIES.items()]
    case = {"interval": "15s", "input_series": series, "promql_expr_test": checks}
    (tmp_path / "gpus.yml").write_text(yaml.safe_dump({"tests": [case]}), encoding="utf-8")
    done = subprocess.run(
        ["promtool", "test", "rules", "gpus.yml"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_is_brought_about_on_the_server_or_it_is_said_why_not() -> None:
    kinds = [set(FIRED_BY_LOAD), FIRED_BY_A_KILL, set(NOT_FIRED)]
    assert set.union(*kinds) == set(alerts())
    assert sum(map(len, kinds)) == len(alerts())
    assert all(NOT_FIRED.values())
