"""The dashboard's queries and the alerts' conditions, as the files in deploy/ have them, and
which of them a machine without a GPU can show.

Every alert is either brought about on the running server or stands below with the reason why it is
not. promtool evaluates all of them over series that are made up.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
RULES = DEPLOY / "prometheus" / "alerts.yml"
DASHBOARD = DEPLOY / "grafana" / "dashboards" / "jitney.json"

# Alert -> the model it warns of, brought about by too much load on the running server.
FIRED_BY_LOAD = {
    "QueueGrowing": "tight",
    "KvCacheNearlyFull": "tight",
    "PreemptionStorm": "tight",
    "TurningAway": "tight",
    "FirstTokenSlow": "tight",
    "ServerQueueGrowing": "slow",
}
FIRED_BY_A_KILL = {"ServerDown", "NotReady", "Restarted"}
_PROMTOOL = "takes long; its value is asked, and promtool has both ways to it"
_NO_JOB = "tests/jobs serves and pushes a job's metrics; no job runs beside this server"
_NO_ENGINE_DIES = "tests/real_server kills and stops engines; nothing here reaches into a stub"
NOT_FIRED = {
    "GatewayDown": _PROMTOOL,
    "ProxyDown": _PROMTOOL,
    "CertificateExpiring": _PROMTOOL,
    "WatchDown": _PROMTOOL,
    "ModelFailing": _PROMTOOL,
    "GatewayFailing": _PROMTOOL,
    "VolumeFull": _PROMTOOL,
    "EngineDown": _NO_ENGINE_DIES,
    "ModelGone": _PROMTOOL,
    "EngineRestarted": _NO_ENGINE_DIES,
    "StepHung": _NO_ENGINE_DIES,
    "JobLate": _NO_JOB,
    "JobRowsBad": _NO_JOB,
    "JobStuck": _NO_JOB,
    "TierWaiting": "no model here has tiers",
    "GpuMemoryFull": "the server has no such metric where there is no GPU",
    "RequestsFailing": "counts failures that are the server's own, which no client can bring about",
}


def needs_gpu(expression: str) -> bool:
    """Whether the server has no data for a query where there is no GPU: metrics named nv_gpu_…"""
    return "nv_gpu_" in expression


def alerts() -> dict[str, str]:
    """Name of an alert -> its condition."""
    rules = yaml.safe_load(RULES.read_text(encoding="utf-8"))
    return {rule["alert"]: rule["expr"] for group in rules["groups"] for rule in group["rules"]}


def value_of(condition: str) -> str:
    """The left side of a condition, whose last comparison is with a number."""
    match = re.fullmatch(r"(.*\S)\s*(==|>=|<=|>|<)\s*[\d.]+\s*", condition, re.S)
    assert match is not None, condition
    return match[1]


def dashboard() -> dict[str, Any]:
    """The dashboard's file."""
    board: dict[str, Any] = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    return board


def dashboard_queries(interval: str, model: str) -> Iterator[tuple[str, str]]:
    """(title of the panel, query) of each, with Grafana's variables filled in."""
    for panel in dashboard()["panels"]:
        for target in panel.get("targets", ()):
            expression = target["expr"].replace("$__rate_interval", interval)
            yield panel["title"], expression.replace("$model", model)
