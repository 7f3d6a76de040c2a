"""The dashboard's queries and the alerts' conditions, as the files in deploy/ have them."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import yaml

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
RULES = DEPLOY / "prometheus" / "alerts.yml"
DASHBOARD = DEPLOY / "grafana" / "dashboards" / "jitney.json"


def alerts() -> dict[str, str]:
    """Name of an alert -> its condition."""
    rules = yaml.safe_load(RULES.read_text(encoding="utf-8"))
    return {rule["alert"]: rule["expr"] for group in rules["groups"] for rule in group["rules"]}


def value_of(condition: str) -> str:
    """The left side of a condition, whose last comparison is with a number."""
    match = re.fullmatch(r"(.*\S)\s*(==|>=|<=|>|<)\s*[\d.]+\s*", condition, re.S)
    assert match is not None, condition
    return match[1]


def dashboard_queries(interval: str, model: str) -> Iterator[tuple[str, str]]:
    """(title of the panel, query) of each, with Grafana's variables filled in."""
    for panel in json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]:
        for target in panel.get("targets", ()):
            expression = target["expr"].replace("$__rate_interval", interval)
            yield panel["title"], expression.replace("$model", model)
