"""Write docs/metrics.md from the tables in frontend/metrics.py and jobs' metrics.py, and from
what a gateway counts, so that they cannot differ.

    python scripts/metrics_table.py

A test compares the file with what this would write.
"""

import re
import sys
import types
from pathlib import Path
from typing import Any

TARGET = Path(__file__).resolve().parent.parent / "docs" / "metrics.md"

INTRODUCTION = """# Metrics

The server's metrics endpoint serves them, beside Triton's (`http://127.0.0.1:8002/metrics`). Every
sample has the labels `model`, `version` and `model_instance`: sum over the last for a model. They
change four times a second (`metrics_flush_s`). Names end in their unit.

"""

HISTOGRAMS = """
Each is sent as the counters `NAME_bucket`, `NAME_sum` and `NAME_count`; `histogram_quantile` works
on them.

"""

TIERS = """
## By tier

With the option [`tiers`](tiers.md) the histograms of requests and `jitney_requests_total` have the
label `tier`. These come in addition:

"""

ORCA = """
Triton makes the load headers of ORCA (`endpoint-load-metrics`) from the family of this name. The
embedded server (2.51) was built without these headers.

"""

JOBS = """
## Of a job

`jitney batch` serves or pushes these ([jobs](jobs.md#metrics)). Every sample has the label `name`,
the job's. Rows count in all runs of a job, seconds and tokens in the present one. A metric is
absent while nothing is known of it.

"""

GATEWAY = """
## Of a gateway

`jitney gateway` serves these at its `/metrics`; their labels stand in
[OpenAI](openai.md#figures). The histograms are real ones.

"""

KINDS = {
    "used": "Blocks that a live sequence refers to",
    "free": "All other blocks, those of the prefix cache too, which can be evicted",
    "max": "Total number of blocks",
    "fraction": "Share of blocks that are used, from 0 to 1",
    "tokens_per": "Tokens in a block",
}

QUERIES = """
## Asking Prometheus

```promql
# 95th percentile of the time to first token
histogram_quantile(0.95, sum by (le) (rate(jitney_time_to_first_token_seconds_bucket[5m])))
# tokens a second
sum(rate(jitney_generated_tokens_total[1m]))
# mean sequences in a step
sum(rate(jitney_batch_sequences_sum[1m])) / sum(rate(jitney_batch_sequences_count[1m]))
# share of looked-up prompt tokens that the prefix cache had
sum(rate(jitney_prefix_hit_tokens_total[5m])) / sum(rate(jitney_prefix_query_tokens_total[5m]))
# share of the cache in use
sum(jitney_kv_used_blocks)
  / sum(jitney_kv_used_blocks + jitney_kv_cached_blocks + jitney_kv_free_blocks)
```
"""


def make_page(metrics: Any, of_jobs: Any, of_gateway: str) -> str:
    """The whole page, from the modules ``metrics`` of ``jitney.frontend`` and of jobs, and the
    first page of a gateway's metrics."""
    outcomes = ", ".join(f"`{outcome}`" for outcome in metrics.OUTCOMES)
    requests = f"Requests by how they ended, in the label `outcome`: {outcomes}"
    causes = ", ".join(f"`{cause}`" for cause in metrics.CAUSES)
    restarts = f"Engines that died, by cause, in the label `cause`: {causes}"
    drafts = {name: f"{text}, by `drafter`" for name, text in metrics.DRAFT_COUNTERS.items()}
    counters = metrics.COUNTERS | drafts
    counters |= {metrics.REQUESTS: requests, metrics.RESTARTS: restarts}
    histograms = {name: text for name, (text, _) in metrics.HISTOGRAMS.items()}
    build = "Always 1; the label `release` is the version of Jitney"
    jobs = {f"jitney_job_{name}": text for name, (text, _) in of_jobs.FAMILIES.items()}
    return "".join(
        [
            INTRODUCTION,
            "## Gauges\n\nTheir values after the last step.\n\n"
            + _table("metric", {**metrics.GAUGES, metrics.BUILD: build}),
            "\n## Counters\n\n",
            _table("metric", counters),
            "\n## Histograms\n" + HISTOGRAMS + _bounds(metrics) + _table("metric", histograms),
            TIERS + _table("metric", {**metrics.TIER_GAUGES, **metrics.TIER_COUNTERS}),
            f"\n## Load headers: `{metrics.ORCA}`\n" + ORCA,
            _table("`kv_cache_block_type`", KINDS),
            JOBS + _table("metric", jobs),
            GATEWAY + _table("metric", dict(re.findall(r"# HELP (\S+) (.*)", of_gateway))),
            QUERIES,
        ]
    )


def _bounds(metrics: Any) -> str:
    """Upper bounds of the buckets, by the unit in which the names of histograms end."""
    of_unit: dict[str, str] = {}
    for name, (_, bounds) in metrics.HISTOGRAMS.items():
        unit = name.rpartition("_")[2]
        written = ", ".join(f"{bound:g}" for bound in bounds)
        assert of_unit.setdefault(unit, written) == written, name
    lines = [f"- `_{unit}`: {written}" for unit, written in of_unit.items()]
    return "Upper bounds of the buckets:\n\n" + "\n".join(lines) + "\n\n"


def _table(head: str, rows: dict[str, str]) -> str:
    lines = [f"| {head} | meaning |", "|---|---|"]
    lines += [f"| `{name}` | {meaning} |" for name, meaning in rows.items()]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Write the page. An empty module replaces the server's, of which nothing is called."""
    name = "triton_python_backend_utils"
    sys.modules.setdefault(name, types.ModuleType(name))
    from jitney.frontend import metrics
    from jitney_gateway.gateway_metrics import GatewayMetrics
    from jitney_jobs import metrics as of_jobs

    of_gateway = GatewayMetrics().exposition().decode()
    TARGET.write_text(make_page(metrics, of_jobs, of_gateway), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
