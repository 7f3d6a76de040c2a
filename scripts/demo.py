"""`make demo`: the real server, our backend, and a dozen requests that share one running batch.

Starts the embedded Triton server over model_repository/, streams one completion to the terminal,
then sends twelve prompts of different lengths over gRPC and HTTP, a tenth of a second apart, shows
how they join and leave the batch, and prints the figures. It asks one question by curl through
the OpenAI API. Then, if `make models` has built them,
the other models: the nearest sentence, a drawn digit, dynamic batching; it stops the server, and
runs a job without one. The exit status is not 0 if anything failed: a request, the batching itself,
the stop, or the job.
"""

import argparse
import re
import statistics
import sys
import threading
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path

import demo_job
import demo_models
import demo_openai
from demo_picture import most_running, picture
from demo_requests import MODEL, DemoRequest, make_requests, send, send_grpc
from jitney.errors import JitneyError
from jitney_server.server import TritonServer
from rich.console import Console
from rich.live import Live
from rich.rule import Rule
from rich.text import Text
from tritonclient.utils import InferenceServerException

ROOT = Path(__file__).resolve().parent.parent
BETWEEN_S = 0.1
SHOWN_LINES = 5


class DemoError(Exception):
    """Something that the demo shows did not happen."""


def main() -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(description="Watch a dozen requests share one batch.")
    parser.add_argument("--plain", action="store_true", help="no live drawing, even on a terminal")
    parser.add_argument("--log-file", type=Path, help="keep the server's log there")
    arguments = parser.parse_args()
    console = Console(highlight=False, soft_wrap=True)
    live = console.is_terminal and not arguments.plain
    try:
        run(console, live, arguments.log_file)
    except (JitneyError, DemoError, InferenceServerException) as error:
        Console(stderr=True, highlight=False).print(Text(f"\nThe demo failed: {error}", "bold red"))
        print("`make doctor` looks for the cause.", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def run(console: Console, live: bool, log_file: Path | None) -> None:
    """The whole demo. Raises DemoError or JitneyError."""
    begin = time.monotonic()
    repository = ROOT / "model_repository"
    left_out = demo_models.missing(repository)
    models = [MODEL] if left_out else [MODEL, *demo_models.NEEDS]
    server = TritonServer(repository, models=models, log_file=log_file)
    note = "Starting the server (the first time, kernels are compiled: up to half a minute) …"
    if live:
        with console.status(note):
            server.start()
    else:
        console.print(note)
        server.start()
    try:
        console.print(
            f"Triton Inference Server is up after {time.monotonic() - begin:.1f} s: "
            f"HTTP {server.http_url}, gRPC {server.grpc_url}"
        )
        show_one(console, server)
        requests = show_many(console, server, live)
        problems = demo_openai.show(console, server)
        problems += [] if left_out else demo_models.show(console, server.grpc_url)
    finally:
        begin = time.monotonic()
        clean = server.stop()
    if not clean:
        problem = server.last_stop.problem
        raise DemoError(f"the stop was not clean: {problem}; its log is {server.log_file}")
    console.print(Rule(style="dim"))
    console.print(f"The server stopped cleanly in {time.monotonic() - begin:.1f} s.")
    if left_out:
        console.print(f"Left out, the models beside the language model: {left_out}.")
    else:
        problems += demo_job.show(console, repository)
    check(requests)
    if problems:
        raise DemoError("; ".join(problems))


def show_one(console: Console, server: TritonServer) -> None:
    """Stream one completion to the terminal, token by token, over gRPC."""
    console.print(Rule("One stream", align="left"))
    request = Printing(0, "gRPC", 'def is_empty(self):\n    """', 80, console=console)
    console.print(Text(request.prompt, "dim"), end="")
    send_grpc(request, server.grpc_url)
    console.print()
    if request.made == 0:
        raise DemoError("the first stream brought no token")


class Printing(DemoRequest):
    """A request whose text is printed as it comes."""

    def __init__(self, *arguments: object, console: Console) -> None:
        super().__init__(*arguments)  # type: ignore[arg-type]
        self._console = console

    def note(self, text: str, count: int, prompt_tokens: int) -> None:
        super().note(text, count, prompt_tokens)
        self._console.print(Text(text), end="")
        self._console.file.flush()


def show_many(console: Console, server: TritonServer, live: bool) -> list[DemoRequest]:
    """Send all requests, one every BETWEEN_S, and plot them; then their texts and the figures."""
    requests = make_requests()
    console.print(Rule(f"{len(requests)} requests, one running batch", align="left"))
    console.print("░ sent, waiting   █ in the batch   (a column is a moment)\n", style="dim")
    before = read_metrics(server.metrics_url)
    begin = time.monotonic()
    threads = [
        threading.Timer(index * BETWEEN_S, send, (request, server.grpc_url, server.http_url))
        for index, request in enumerate(requests)
    ]
    for thread in threads:
        thread.start()
    if live:
        watch_live(console, requests, threads, begin)
    else:
        watch_plainly(console, requests, threads, begin)
    end = time.monotonic()
    time.sleep(0.6)  # metrics are flushed a few times a second
    after = read_metrics(server.metrics_url)
    show_texts(console, requests)
    show_figures(console, requests, end - begin, before, after)
    return requests


def watch_live(
    console: Console, requests: list[DemoRequest], threads: list[threading.Timer], begin: float
) -> None:
    """Update the plot until all have ended."""
    width = console.width
    with Live(console=console, refresh_per_second=12, transient=False) as live:
        while any(thread.is_alive() for thread in threads):
            live.update(picture(requests, begin, time.monotonic(), width=width, tails=True))
            time.sleep(0.05)
        live.update(picture(requests, begin, time.monotonic(), width=width, tails=False))


def watch_plainly(
    console: Console, requests: list[DemoRequest], threads: list[threading.Timer], begin: float
) -> None:
    """A line for each request that joins the batch or ends, and the plot at the end."""
    joined: set[int] = set()
    ended: set[int] = set()
    alive = True
    while alive:
        alive = any(thread.is_alive() for thread in threads)  # before the last look
        for request in requests:
            number = request.number
            via = request.via
            if request.started is not None and number not in joined:
                joined.add(number)
                console.print(
                    f"{request.started - begin:5.2f} s  {number:>2} joins ({via}, prompt of "
                    f"{request.prompt_tokens} tokens); running: {len(joined) - len(ended)}"
                )
            if request.ended is not None and number in joined and number not in ended:
                ended.add(number)
                console.print(
                    f"{request.ended - begin:5.2f} s  {number:>2} ends after {request.made} "
                    f"tokens; running: {len(joined) - len(ended)}"
                )
        time.sleep(0.02)
    console.print()
    console.print(picture(requests, begin, time.monotonic(), width=100, tails=False))


def show_texts(console: Console, requests: Sequence[DemoRequest]) -> None:
    """The first lines of each completion, after the end of its prompt."""
    for request in requests:
        console.print(Rule(f"{request.number}, {request.via}", align="left", style="dim"))
        if request.error:
            console.print(Text(request.error, "red"))
            continue
        prompt = "\n".join(request.prompt.strip("\n").splitlines()[-2:])
        written = re.sub(r"\n\s*\n", "\n", request.text).split("\n")
        more = "\n…" if len(written) > SHOWN_LINES else ""
        console.print(Text.assemble((prompt, "dim"), "\n".join(written[:SHOWN_LINES]) + more))


def show_figures(
    console: Console,
    requests: Sequence[DemoRequest],
    seconds: float,
    before: dict[str, float],
    after: dict[str, float],
) -> None:
    """Batching in numbers: the clients' clocks, and the server's metrics where it says so."""
    console.print(Rule("Figures", align="left"))
    grown = {name: after[name] - before.get(name, 0.0) for name in after}
    made = sum(request.made for request in requests)
    first = [p.started - p.sent for p in requests if p.started and p.sent]
    steps = grown.get("jitney_batch_sequences_count", 0.0)
    rows = [
        ("requests", f"{len(requests)}, by gRPC and HTTP in turn, one every {BETWEEN_S:.1f} s"),
        ("prompt tokens", f"{sum(request.prompt_tokens for request in requests)}"),
        ("tokens made", f"{made} in {seconds:.2f} s: {made / seconds:.0f} a second"),
        ("running at once", f"up to {most_running(requests)}"),
    ]
    if first:
        rows.append(
            (
                "first token after",
                f"{1000 * statistics.median(first):.0f} ms (median), {1000 * max(first):.0f} ms "
                f"(longest)",
            )
        )
    if steps:
        mean = grown["jitney_batch_sequences_sum"] / steps
        rows.append(
            (
                "steps (metrics)",
                f"{steps:.0f}, with {mean:.1f} sequences each on average; one after the other "
                f"they would have been {grown['jitney_batch_sequences_sum']:.0f}",
            )
        )
    for name, value in rows:
        console.print(f"  {name:<18} {value}")


def check(requests: Sequence[DemoRequest]) -> None:
    """Raise DemoError unless every request ended well and they did share a batch."""
    for request in requests:
        if request.error:
            raise DemoError(f"request {request.number}: {request.error}")
        if not 1 <= request.made <= request.max_tokens:
            raise DemoError(
                f"request {request.number} brought {request.made} tokens, not 1 to "
                f"{request.max_tokens}"
            )
    if most_running(requests) < 2:
        raise DemoError("no two requests were in the batch at once")


def read_metrics(url: str) -> dict[str, float]:
    """Name -> value of the model's own metrics, over all labels but histogram buckets."""
    with urllib.request.urlopen(url, timeout=10) as response:
        text = response.read().decode()
    found: dict[str, float] = {}
    for name, value in re.findall(r"^(jitney_\w+)\{[^}]*\} (\S+)$", text, re.M):
        if not name.endswith("_bucket"):
            found[name] = found.get(name, 0.0) + float(value)
    return found


if __name__ == "__main__":
    sys.exit(main())
