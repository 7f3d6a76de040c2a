"""perf_analyzer, and one load with it: warm up, count, run it, count again, read its export.

Runs are by number of requests: windows of time that must agree fail on a noisy machine and leave no
report. How steady a run was is judged by the times of its requests instead. Throughput is of the
time from the first to the last request sent, under the whole load; latencies are of all requests.
"""

import json
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jitney.access import Access
from jitney.errors import InstallationError, InternalError

from jitney_measure import slo
from jitney_measure.inputs import Inputs
from jitney_measure.options import Shared
from jitney_measure.pages.text import printable
from jitney_measure.record import PERCENTS, Distribution, Load, Measurement, Point, Result
from jitney_measure.target import Model, Snapshot, Target, engine_work, snapshot, stages

_HOW = (
    "In a source checkout, `python scripts/fetch_perf_analyzer.py` puts it into the environment; "
    "NVIDIA's image tritonserver:<release>-py3-sdk has it on its path (with compose: "
    "`docker compose --profile perf run --rm perf`); or name it with --perf-analyzer"
)
_SETTLE_S = 0.1
_LANGUAGE_SETTLE_S = 0.6
"""Seconds before the server's counts are read again. It counts a request after its answer, and
metrics are a quarter of a second late: so counts are read until two readings agree."""
_READINGS = 10
"""Most readings: where others use the model, two of them never agree."""
_PATIENCE_S = 60.0
"""A run may take three times as long as expected, and this much more."""


@dataclass(frozen=True)
class PerfAnalyzer:
    """A binary that starts, and its version."""

    binary: Path
    version: str

    @classmethod
    def find(cls, named: Path | None = None) -> "PerfAnalyzer":
        """Where the user says, else in the Python environment, else on the path.

        Raises InstallationError that says how to get it if it is missing or does not start.
        """
        fetched = Path(sys.prefix) / "perf_analyzer" / "perf_analyzer"
        found = named or (fetched if fetched.is_file() else shutil.which("perf_analyzer"))
        if found is None:
            raise InstallationError(
                f"perf_analyzer is neither in {fetched.parent} nor on the path. {_HOW}"
            )
        binary = Path(found).absolute()
        try:
            done = subprocess.run(
                [binary, "--version"], env=_environment(binary), stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT, text=True, timeout=30, check=True,
            )  # fmt: skip
        except (OSError, subprocess.SubprocessError) as error:
            said = error.stdout if isinstance(error, subprocess.CalledProcessError) else str(error)
            reason = said.strip().partition("\n")[0]
            raise InstallationError(f"{binary} does not start: {reason}. {_HOW}") from None
        number = re.search(r"version:? *(\d\S*)", done.stdout, re.IGNORECASE)
        return cls(binary, number[1] if number else done.stdout.partition("\n")[0])

    def run(self, arguments: Sequence[str], access: Access, log: Path, limit_s: float) -> bool:
        """Whether it ended in time; else it is ended. Raises InternalError with its last words."""
        with log.open("wb") as output:
            try:
                status = subprocess.run(
                    [self.binary, *arguments], env=_environment(self.binary), stdout=output,
                    stderr=output, stdin=subprocess.DEVNULL, timeout=limit_s, check=False,
                ).returncode  # fmt: skip
            except subprocess.TimeoutExpired:  # its text has the command line, which holds the key
                return False
        if status != 0:
            text = printable(access.hide(log.read_text(encoding="utf-8", errors="replace")))
            lines = [line.strip() for line in text.splitlines() if line.strip()]
            telling = [line for line in lines if re.search("(?i)error|fail|invalid", line)]
            reason = " / ".join((telling or lines)[-3:])[:600]
            raise InternalError(f"perf_analyzer ended with status {status}: {reason}")
        return True


def _environment(binary: Path) -> dict[str, str]:
    """This process' own, with the libraries that were fetched beside the binary."""
    paths = (str(binary.parent), os.environ.get("LD_LIBRARY_PATH"))
    return {**os.environ, "LD_LIBRARY_PATH": ":".join(filter(None, paths))}


def _settled(target: Target, model: Model) -> Snapshot:
    made = snapshot(target, model)
    for _ in range(_READINGS):
        time.sleep(_LANGUAGE_SETTLE_S if model.language else _SETTLE_S)
        before = made
        made = snapshot(target, model)
        if made == before:
            break
    return made


@dataclass
class Driver:
    """Puts loads on a server.

    Each load and each warm-up has random requests of its own, so that none is in the prefix cache
    already. A load has the same requests for each setting that is tuned.
    """

    options: Shared
    loads: tuple[Load, ...]
    inputs: Inputs
    tool: PerfAnalyzer
    whole_batches: int = 1
    """The batch of a model that answers only full ones: the number of requests is a multiple of it,
    and no fewer are in flight. 1 for any other model."""
    more: tuple[str, ...] = ()
    """Further arguments of perf_analyzer."""

    def run(self, target: Target, model: Model, load: Load) -> Point:
        """A point of state "failed" says what went wrong under the load.

        Raises InvalidArgumentError for a model whose inputs cannot be made up.
        """
        requests = self.inputs.file(target, model, f"{load}")
        warm_up_requests = self.inputs.file(target, model, f"{load} warm-up")
        warm_up_load, warm_up_count = slo.warm_up(load)
        if warm_up_load.level < self.whole_batches:
            warm_up_load = Load("concurrency", self.whole_batches)
        try:
            warmed = self._measure(
                target, model, warm_up_load, self._whole(warm_up_count), warm_up_requests
            )
            pace = load.level if load.kind == "rate" else warmed.requests_per_s
            count = self._whole(slo.count(self.options, load, pace))
            before = _settled(target, model)
            measured = self._measure(target, model, load, count, requests, count / max(pace, 1e-3))
            after = _settled(target, model)
        except InternalError as error:
            # perf_analyzer ends without a reason if the server refuses the statistics.
            missing = snapshot(target, model).missing
            hint = [f"{text}: perf_analyzer needs them too" for text in missing]
            return Point(load, "failed", (str(error), *hint))
        state, doubts = slo.doubts(self.options, load, measured)
        remarks = tuple(dict.fromkeys((*doubts, *before.missing, *after.missing)))
        work = engine_work(before, after)
        return Point(load, state, remarks, measured, stages(before, after), work)

    def _whole(self, count: int) -> int:
        """So many requests, or as many more as fill the last batch."""
        return math.ceil(count / self.whole_batches) * self.whole_batches

    def _measure(
        self, target: Target, model: Model, load: Load, count: int, requests: Path,
        expected_s: float = 0.0,
    ) -> Measurement:  # fmt: skip
        """One run of perf_analyzer, which sometimes hangs near its end: then another one.

        Raises InternalError.
        """
        limit_s = 3 * expected_s + _PATIENCE_S
        for _ in range(2):
            with tempfile.TemporaryDirectory(prefix="jitney-sweep-") as folder:
                export = Path(folder, "profile.json")
                log = Path(folder, "output")
                words = self.arguments(target, model, load, requests, count, export)
                if self.tool.run(words, target.access, log, limit_s):
                    found = read_export(export)
                    return measure(found, language=model.language, rows=self.options.rows)
        raise InternalError("perf_analyzer hung twice")

    def result(
        self, target: Target, model: Model, points: Sequence[Point], title: str, server: str,
        began: str,
    ) -> Result:  # fmt: skip
        """The points with all that a report says of them, judged by the bounds."""
        address = target.grpc if self.options.protocol == "grpc" else target.http
        result = Result(
            title, model.name, model.language, address, server, self.tool.version, began,
            self.options.reported(), tuple(points), self.options.slo,
        )  # fmt: skip
        return slo.judged(result, slo.parse(self.options.slo, language=model.language))

    def arguments(
        self, target: Target, model: Model, load: Load, requests: Path, count: int, export: Path
    ) -> list[str]:
        """perf_analyzer's command line. It holds the secrets of the target: show it nowhere."""
        protocol = self.options.protocol
        words = ["-m", model.name, "-u", target.address(protocol), "-i", protocol]
        # Rates are kept by asynchronous calls only; over HTTP, users are threads.
        words += ["--async"] if protocol == "grpc" or load.kind == "rate" else []
        words += ["--streaming"] if model.language else []
        words += ["-b", str(self.options.rows)] if model.max_batch_size else []
        if load.kind == "concurrency":
            words += ["--concurrency-range", f"{load.level:g}"]
            if self.whole_batches > 1:
                # Several senders end at different times, and the last alone fills no batch.
                words += ["--max-threads", "1"]
        else:  # One sender: several divide the requests among them and end at different times.
            words += ["--request-rate-range", f"{load.level:g}", "--max-threads", "1"]
            words += ["--request-distribution", self.options.arrivals]
        # -s: a report even if its windows differ.
        words += ["--input-data", str(requests), "--request-count", str(count), "-s", "999"]
        words += ["--profile-export-file", str(export)]
        return [*words, *access_arguments(target.access, protocol), *self.more]


def access_arguments(access: Access, protocol: str) -> list[str]:
    """Its -H works for gRPC too, although its help says otherwise."""
    grpc = protocol == "grpc"
    made = ["--ssl-grpc-use-ssl", "true"] if access.tls and grpc else []
    if access.ca_file is not None:
        file = "grpc-root-certifications" if grpc else "https-ca-certificates"
        made += [f"--ssl-{file}-file", str(access.ca_file)]
    for name, value in access.headers:
        made += ["-H", f"{name}:{value}"]
    return made


@dataclass(frozen=True)
class Exchange:
    """One request. Times are seconds of one clock."""

    sent: float
    responses: tuple[float, ...]  # those that have content; none if the request failed
    tokens: tuple[int, ...] | None  # in each response, if the server counts them
    ended: float | None  # the last response, with or without content; None if there was none
    input_tokens: int | None = None

    @property
    def counts(self) -> tuple[int, ...]:
        """Tokens in each response, one for each if the server does not count them."""
        return self.tokens or (1,) * len(self.responses)


def read_export(path: Path) -> list[Exchange]:
    """The requests of an export with one load. Raises InternalError if it cannot be read.

    Tensors are in its strings as raw bytes, so the text is not UTF-8.
    """
    try:
        profile = json.loads(path.read_text(encoding="latin-1"), strict=False)
        requests = profile["experiments"][0]["requests"]
        # Nanoseconds since 1970 are too many for a float: count from the first.
        origin = min((request["timestamp"] for request in requests), default=0)
        return [_exchange(request, origin) for request in requests]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise InternalError(f"perf_analyzer's export cannot be read: {error!r}") from None


def _exchange(request: dict[str, Any], origin: int) -> Exchange:
    times = [(at - origin) * 1e-9 for at in request["response_timestamps"]]
    outputs = request["response_outputs"]
    counts = [_integer(output, "num_output_tokens") for output in outputs]
    inputs = [_integer(output, "num_input_tokens") for output in outputs]
    counted = any(counts)
    # The final response may be empty: it has no outputs, or counts no token.
    kept = [i for i in range(len(times)) if (counts[i] if counted else outputs[i])]
    return Exchange(
        sent=(request["timestamp"] - origin) * 1e-9,
        responses=tuple(times[i] for i in kept),
        tokens=tuple(counts[i] for i in kept) if counted else None,
        ended=times[-1] if times else None,
        input_tokens=max(inputs, default=0) or None,
    )


def _integer(output: dict[str, Any], name: str) -> int:
    """An UINT32 tensor's first element, exported as raw bytes; 0 if it was not exported."""
    raw = output.get(name, "")
    return raw if isinstance(raw, int) else int.from_bytes(raw[:4].encode("latin-1"), "little")


def measure(exchanges: Sequence[Exchange], *, language: bool, rows: int = 1) -> Measurement:
    """The figures of one load; each request has ``rows``.

    Raises InternalError if no request was answered.
    """
    done = [exchange for exchange in exchanges if exchange.responses]
    if not done:
        raise InternalError(f"none of {len(exchanges):,} requests was answered")
    sent = np.array([e.sent for e in exchanges])
    ended = np.array([e.ended or e.sent for e in exchanges])  # unanswered: not in flight
    answered = np.array([bool(e.responses) for e in exchanges])
    starts = sent[answered]
    ends = ended[answered]
    latency = ends - starts
    # The window ends with the last request that is sent: so long the whole load is on the server.
    begin = sent.min()
    end = sent.max()
    if np.count_nonzero(ends <= end) < min(3, len(ends)):
        end = ends.max()  # so few that all were sent at once: take the whole time
    window = max(float(end - begin), 1e-9)
    edges = begin + window * np.arange(4) / 3
    if language:
        times = np.array([at for exchange in done for at in exchange.responses])
        amounts = np.array([count for exchange in done for count in exchange.counts])
    else:
        times = ends
        amounts = np.full(len(ends), rows)
    inside = times <= end
    third = np.clip(np.digitize(starts, edges) - 1, 0, 2)
    medians = [np.median(latency[third == i]) for i in np.unique(third)]
    return Measurement(
        requests=len(exchanges),
        failed=len(exchanges) - len(done),
        window_s=window,
        # What counts is an int in some versions of numpy and a scalar of numpy's in others.
        sent_per_s=float(np.count_nonzero(sent < end) / window),
        requests_per_s=float(np.count_nonzero(ends <= end) / window),
        throughput=float(amounts[inside].sum()) / window,
        latency=_distribution(latency),
        spread=_spread(np.histogram(times[inside], edges, weights=amounts[inside])[0]),
        latency_spread=_spread(np.array(medians)),
        under_way=tuple(int(np.sum((sent < edge) & (ended > edge))) for edge in edges[1:]),
        **(_token_figures(done) if language else {}),
    )


def _token_figures(done: Sequence[Exchange]) -> dict[str, Any]:
    gaps = np.concatenate([np.diff(e.responses) for e in done])
    tokens = np.array([max(count, 1) for e in done for count in e.counts[1:]], int)
    later = [(e, sum(e.counts[1:])) for e in done]  # tokens after the first response
    asked = [e.input_tokens for e in done if e.input_tokens is not None]
    tpot = [(e.responses[-1] - e.responses[0]) / count for e, count in later if count]
    # For the ITL, the gap before a response is divided among its tokens, and counts once for each.
    return {
        "ttft": _distribution([e.responses[0] - e.sent for e in done]),
        "itl": _distribution(np.repeat(gaps / tokens, tokens)) if len(gaps) else None,
        "gap": _distribution(gaps) if len(gaps) else None,
        "tpot": _distribution(tpot) if tpot else None,
        "output_tokens": sum(sum(e.counts) for e in done),
        "input_tokens_mean": float(np.mean(asked)) if asked else None,
        "tokens_from": "counts" if all(e.tokens is not None for e in done) else "responses",
    }


def _distribution(values: Sequence[float] | np.ndarray) -> Distribution:
    quantiles = np.percentile(values, PERCENTS)
    return Distribution(len(values), float(np.mean(values)), tuple(map(float, quantiles)))


def _spread(values: np.ndarray) -> float:
    """(largest - smallest) / median."""
    median = float(np.median(values))
    return float(values.max() - values.min()) / median if median > 0 else 0.0
