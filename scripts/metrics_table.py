"""Write docs/metrics.md from the tables in frontend/metrics.py, so that the two cannot differ.

    python scripts/metrics_table.py

A test compares the file with what this would write.
"""

import sys
import types
from pathlib import Path
from typing import Any

TARGET = Path(__file__).resolve().parent.parent / "docs" / "metrics.md"

INTRODUCTION = """# Metrics

They stand at the server's own endpoint, beside Triton's (`http://127.0.0.1:8002/metrics`;
`jitney serve` prints the address). Every sample carries the labels `model`, `version` and
`model_instance`. Each instance counts for itself: sum over `model_instance` for a model.

What happens is added up in the model's process and sent four times a second
(`metrics_flush_s`), only as far as it changed. Names end in their unit.

"""

HISTOGRAMS = """
Triton takes one observation of a histogram at a time, which thousands of tokens a second do not
allow. So each of these is sent as the three families that a histogram consists of: the counters
`NAME_bucket` (label `le`, cumulative, up to `+Inf`), `NAME_sum` and `NAME_count`. Prometheus'
`histogram_quantile` works on them as on any other; only their declared type is `counter`.

"""

ORCA = """
Triton makes the load headers of ORCA (`endpoint-load-metrics`), by which gateways choose a server,
from one family of this name, whichever backend it belongs to. The server in the `nvidia-pytriton`
wheel (2.51) was built without these headers: there the family can be read, and no more.

"""

KINDS = {
    "used": "Blocks that a live sequence refers to",
    "free": "All others: those kept for their content can be evicted",
    "max": "Blocks in all",
    "fraction": "Used of all, from 0 to 1",
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


def make_page(metrics: Any) -> str:
    """The whole page, from the module ``jitney.frontend.metrics``."""
    outcomes = ", ".join(f"`{outcome}`" for outcome in metrics.OUTCOMES)
    requests = f"Requests by how they ended, in the label `outcome`: {outcomes}"
    buckets = {
        name: f"{text}. Bounds: {', '.join(f'{bound:g}' for bound in bounds)}"
        for name, (text, bounds) in metrics.HISTOGRAMS.items()
    }
    return "".join(
        [
            INTRODUCTION,
            "## Gauges\n\nAs after the last step.\n\n" + _table("metric", metrics.GAUGES),
            "\n## Counters\n\n",
            _table("metric", {**metrics.COUNTERS, metrics.REQUESTS: requests}),
            "\n## Histograms\n" + HISTOGRAMS + _table("metric", buckets),
            f"\n## Load headers: `{metrics.ORCA}`\n" + ORCA,
            _table("`kv_cache_block_type`", KINDS),
            QUERIES,
        ]
    )


def _table(head: str, rows: dict[str, str]) -> str:
    lines = [f"| {head} | meaning |", "|---|---|"]
    lines += [f"| `{name}` | {meaning} |" for name, meaning in rows.items()]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Write the page. Outside of the server its module is stood in for: nothing of it is called."""
    name = "triton_python_backend_utils"
    sys.modules.setdefault(name, types.ModuleType(name))
    from jitney.frontend import metrics

    TARGET.write_text(make_page(metrics), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
