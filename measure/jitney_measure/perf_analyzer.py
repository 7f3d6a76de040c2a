"""perf_analyzer, and one load with it: warm up, count, run it, count again, read its export.

The length of a run is a number of requests. perf_analyzer can measure windows of time instead, but
it exits without a report if these do not agree with each other, as on a noisy machine. How steady a
run was is judged by us, from the times of its requests.
"""

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

from jitney.access import Access
from jitney.errors import InstallationError, InternalError

from jitney_measure import slo
from jitney_measure.exchanges import measure, read_export
from jitney_measure.inputs import Inputs
from jitney_measure.loads import assess, request_count, warm_up
from jitney_measure.options import Shared
from jitney_measure.pages.text import printable
from jitney_measure.record import Load, LoadPoint, Measurement, Result
from jitney_measure.server_counts import Snapshot, engine_work, snapshot, stages
from jitney_measure.target import Model, Target

_HOW = (
    "In a source checkout, `python scripts/fetch_perf_analyzer.py` puts it into the environment; "
    "NVIDIA's image tritonserver:<release>-py3-sdk has it on its path (with compose: "
    "`docker compose --profile perf run --rm perf`); or name it with --perf-analyzer"
)
_SETTLE_S = 0.1
"""Seconds between two readings of the server's statistics."""
_LANGUAGE_SETTLE_S = 0.6
"""The same for the metrics of an engine, which are a quarter of a second late."""
_MAX_READINGS = 10
_PATIENCE_S = 60.0
"""A run may take three times as long as expected, and this much more."""
_SECOND_WARM_UP = 5
"""A warm-up that took longer than _PATIENCE_S is tried once more, with this many times the limit.
Before the first warm-up nothing says how long the requests take."""


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
                [binary, "--version"],
                env=_environment(binary),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=30,
                check=True,
            )
        except (OSError, subprocess.SubprocessError) as error:
            text = error.stdout if isinstance(error, subprocess.CalledProcessError) else str(error)
            reason = text.strip().partition("\n")[0]
            raise InstallationError(f"{binary} does not start: {reason}. {_HOW}") from None
        number = re.search(r"version:? *(\d\S*)", done.stdout, re.IGNORECASE)
        first_line = done.stdout.partition("\n")[0]
        return cls(binary, number[1] if number else first_line)

    def run(self, arguments: Sequence[str], access: Access, log: Path, limit_s: float) -> bool:
        """False if it took longer than ``limit_s`` and was killed. Raises InternalError, with
        the reason that it printed, if it failed."""
        with log.open("wb") as output:
            try:
                done = subprocess.run(
                    [self.binary, *arguments],
                    env=_environment(self.binary),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    timeout=limit_s,
                    check=False,
                )
            except subprocess.TimeoutExpired:  # its text has the command line, which holds the key
                return False
        if done.returncode != 0:
            text = printable(access.hide(log.read_text(encoding="utf-8", errors="replace")))
            reason = _reason(text)
            raise InternalError(f"perf_analyzer ended with status {done.returncode}: {reason}")
        return True


def _environment(binary: Path) -> dict[str, str]:
    """The environment of this process. The binary finds its libraries too, which were fetched into
    its folder."""
    paths = (str(binary.parent), os.environ.get("LD_LIBRARY_PATH"))
    return {**os.environ, "LD_LIBRARY_PATH": ":".join(filter(None, paths))}


def _reason(output: str) -> str:
    """The last three lines that speak of an error, else the last three lines."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if re.search("(?i)error|fail|invalid", line)]
    return " / ".join((errors or lines)[-3:])[:600]


def _settled(target: Target, model: Model) -> Snapshot:
    """The server's counts once it has counted all that it answered: it counts a request after its
    answer. So they are read until two readings agree."""
    reading = snapshot(target, model)
    for _ in range(_MAX_READINGS):  # if others use the model, two readings never agree
        time.sleep(_LANGUAGE_SETTLE_S if model.language else _SETTLE_S)
        before = reading
        reading = snapshot(target, model)
        if reading == before:
            break
    return reading


@dataclass
class Driver:
    """Puts loads on a server.

    Each load and each warm-up has random requests of its own, so that none is in the prefix cache
    already. The salt of the requests depends on the load alone, so all settings that are tuned get
    the same ones. A second try, after perf_analyzer hung, gets others.
    """

    options: Shared
    loads: tuple[Load, ...]
    inputs: Inputs
    tool: PerfAnalyzer
    whole_batches: int = 1
    """The size of the batches of a model that answers only full ones; 1 for any other model. The
    number of requests is a multiple of it. A closed loop must keep at least so many in flight:
    callers see to that for ``loads``, :meth:`run` does for the warm-up. Only
    ``benchmarks.batching`` sets it."""
    more: tuple[str, ...] = ()
    """Further arguments of perf_analyzer. Only ``benchmarks.batching`` gives any."""

    def run(self, target: Target, model: Model, load: Load) -> LoadPoint:
        """A point of state "failed" says what went wrong under the load.

        Raises InvalidArgumentError for a model whose inputs cannot be made up.
        """
        warm_up_load, warm_up_count = warm_up(load)
        if warm_up_load.level < self.whole_batches:
            warm_up_load = Load("concurrency", self.whole_batches)
        try:
            warmed = self._measure(
                target,
                model,
                warm_up_load,
                count=self._whole(warm_up_count),
                salt=f"{load} warm-up",
                limits_s=(_PATIENCE_S, _SECOND_WARM_UP * _PATIENCE_S),
            )
            requests_per_s = load.level if load.kind == "rate" else warmed.requests_per_s
            count = self._whole(request_count(self.options, load, requests_per_s))
            expected_s = count / max(requests_per_s, 1e-3)
            limit_s = 3 * expected_s + _PATIENCE_S
            before = _settled(target, model)
            measured = self._measure(
                target, model, load, count=count, salt=f"{load}", limits_s=(limit_s, limit_s)
            )
            after = _settled(target, model)
        except InternalError as error:
            # perf_analyzer ends without a reason if the server refuses the statistics.
            missing = snapshot(target, model).missing
            hints = [f"{text}: perf_analyzer needs them too" for text in missing]
            return LoadPoint(load, "failed", (str(error), *hints))
        assessment = assess(self.options, load, measured)
        remarks = dict.fromkeys((*assessment.remarks, *before.missing, *after.missing))
        return LoadPoint(
            load=load,
            state=assessment.state,
            remarks=tuple(remarks),
            measured=measured,
            stages=stages(before, after),
            engine=engine_work(before, after),
        )

    def _whole(self, count: int) -> int:
        """So many requests, or as many more as fill the last batch."""
        return math.ceil(count / self.whole_batches) * self.whole_batches

    def _measure(
        self,
        target: Target,
        model: Model,
        load: Load,
        *,
        count: int,
        salt: str,
        limits_s: tuple[float, float],
    ) -> Measurement:
        """Runs perf_analyzer, which sometimes hangs near its end: then it is killed and run again.
        ``limits_s``: the time of each try. Raises InternalError."""
        # The second try has other prompts: those of the first are in the prefix cache.
        salts = (salt, f"{salt} again")
        for salt_of_try, limit_s in zip(salts, limits_s, strict=True):
            entries = count * self.options.rows
            requests = self.inputs.file(target, model, salt_of_try, entries)
            with tempfile.TemporaryDirectory(prefix="jitney-sweep-") as folder:
                export = Path(folder, "profile.json")
                log = Path(folder, "output")
                words = self.arguments(target, model, load, requests, count, export)
                if self.tool.run(words, target.access, log, limit_s):
                    exchanges = read_export(export)
                    return measure(exchanges, language=model.language, rows=self.options.rows)
        raise InternalError("perf_analyzer hung twice")

    def result(
        self,
        target: Target,
        model: Model,
        points: Sequence[LoadPoint],
        *,
        title: str,
        server: str,
        began: str,
    ) -> Result:
        """The points with all that a report says of them, judged by the bounds."""
        result = Result(
            title=title,
            model=model.name,
            language=model.language,
            address=target.grpc if self.options.protocol == "grpc" else target.http,
            server=server,
            perf_analyzer=self.tool.version,
            began=began,
            options=self.options.reported(),
            points=tuple(points),
            slo=self.options.slo,
        )
        return slo.judged(result, slo.parse(self.options.slo, language=model.language))

    def arguments(
        self, target: Target, model: Model, load: Load, requests: Path, count: int, export: Path
    ) -> list[str]:
        """perf_analyzer's command line. It holds the secrets of the target: show it nowhere."""
        protocol = self.options.protocol
        words = ["-m", model.name, "-u", target.address(protocol), "-i", protocol]
        # Over HTTP a concurrency needs no --async: each user is a thread. A rate always needs it.
        if protocol == "grpc" or load.kind == "rate":
            words.append("--async")
        if model.language:
            words.append("--streaming")
        if model.max_batch_size:
            words += ["-b", str(self.options.rows)]
        if load.kind == "concurrency":
            words += ["--concurrency-range", f"{load.level:g}"]
            if self.whole_batches > 1:
                # Several senders end at different times, and the last alone fills no batch.
                words += ["--max-threads", "1"]
        else:
            # One sender: several would divide the requests among them, and end at different times.
            words += ["--request-rate-range", f"{load.level:g}", "--max-threads", "1"]
            words += ["--request-distribution", self.options.arrivals]
        # -s: a report even if its windows differ.
        words += ["--input-data", str(requests), "--request-count", str(count), "-s", "999"]
        words += ["--profile-export-file", str(export)]
        return [*words, *access_arguments(target.access, protocol), *self.more]


def access_arguments(access: Access, protocol: str) -> list[str]:
    """perf_analyzer's arguments for TLS and headers. They hold secrets."""
    is_grpc = protocol == "grpc"
    words = []
    if access.tls and is_grpc:  # over HTTP the address says it: https://
        words += ["--ssl-grpc-use-ssl", "true"]
    if access.ca_file is not None:
        kind = "grpc-root-certifications" if is_grpc else "https-ca-certificates"
        words += [f"--ssl-{kind}-file", str(access.ca_file)]
    for name, value in access.headers:
        # For gRPC too, although perf_analyzer's help says that -H is of HTTP alone.
        words += ["-H", f"{name}:{value}"]
    return words
