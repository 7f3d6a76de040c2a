"""Many streams of the demo model at once: how even is the time between two responses of a stream?

    python -m benchmarks.gaps

Every stream has a prompt of its own, as many tokens in as out, and begins at once. Gaps are between
two responses of one request, so they begin with its first token.
"""

import argparse
import asyncio
import json
import random

import numpy as np
from jitney_server.server import TritonServer

from benchmarks.engine import ROOT
from benchmarks.served import run_streams
from benchmarks.workloads import Workload

MODEL = "pylm"
REPOSITORY = ROOT / "model_repository"


def main() -> None:
    """Run the streams after a few that warm up, and print the quantiles."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=128, help="of each prompt and each output")
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    config = REPOSITORY / MODEL / "1" / "checkpoint" / "config.json"
    vocab_size = json.loads(config.read_text(encoding="utf-8"))["vocab_size"]
    chance = random.Random(1)

    def workload(streams: int) -> Workload:
        prompts = [chance.choices(range(vocab_size), k=arguments.tokens) for _ in range(streams)]
        return Workload("streams", prompts, [arguments.tokens] * streams, "output")

    print("| streams | tok/s | first response p50 / p95, s | gap p50 / p95, ms | p95 by p50 |")
    print("|---|---|---|---|---|")
    with TritonServer(REPOSITORY, models=[MODEL]) as server:
        for streams in [8] + [arguments.streams] * arguments.repeats:
            run = asyncio.run(run_streams(server.grpc_url, MODEL, workload(streams), streams))
            first = np.quantile(run.first_s, [0.5, 0.95])
            half, most = np.quantile(run.gaps_s, [0.5, 0.95])
            gaps = f"{1e3 * half:.0f} / {1e3 * most:.0f} | {most / half:.2f}"
            rate = run.tokens / run.seconds
            print(f"| {streams} | {rate:,.0f} | {first[0]:.2f} / {first[1]:.2f} | {gaps} |")


if __name__ == "__main__":
    main()
