"""The server's own counts before and after a load: queue, compute, batch sizes, the engine's steps.

Triton's statistics are per model; what an engine of ours does stands in its metrics alone, because
the server's own queue is empty before a decoupled model.
"""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jitney.errors import JitneyError
from jitney.sweep.record import EngineWork, Stage
from jitney.sweep.target import Target

_SAMPLE = re.compile(r"^([a-zA-Z_:][a-zA-Z0-9_:]*)\{([^}]*)\} (\S+)$")
_LABEL = re.compile(r'([a-zA-Z_]\w*)="((?:[^"\\]|\\.)*)"')
_COUNTERS = ("_total", "_bucket", "_count", "_sum")
"""How the names of metrics end that only grow, as long as the server runs."""
_COMPUTE = ("compute_input", "compute_infer", "compute_output")


@dataclass(frozen=True)
class Counts:
    """One model at one moment. Only differences mean anything."""

    inferences: int
    executions: int
    requests: int
    """Those whose queueing and computing were timed."""
    queue_ns: int
    compute_ns: int
    batches: Counter[int]


@dataclass(frozen=True)
class Snapshot:
    """All that is read at one moment."""

    stages: dict[str, Counts]
    metrics: dict[tuple[str, str], float] | None
    """(name, label le or "") -> sum over instances; None if the endpoint does not answer."""
    missing: tuple[str, ...] = ()
    """What could not be read and why."""


def snapshot(target: Target, models: Sequence[str], engine: str | None) -> Snapshot:
    """Statistics of ``models``, and the engine metrics of the model ``engine`` if there is one.

    Never raises for what the server keeps back: the measurement stands without it.
    """
    stages: dict[str, Counts] = {}
    missing = []
    try:
        stages = {name: read_statistics(target.statistics(name)) for name in models}
    except JitneyError as error:
        missing.append(f"no statistics of the server ({error})")
    except (KeyError, TypeError, ValueError) as error:
        missing.append(f"the server's statistics cannot be read ({error!r})")
    metrics = None
    if engine is not None:
        try:
            metrics = read_metrics(target.metrics_text(), engine)
        except (JitneyError, ValueError) as error:
            missing.append(f"no figures of the engine ({error})")
    return Snapshot(stages, metrics, tuple(missing))


def read_statistics(said: dict[str, Any]) -> Counts:
    """Adds up the versions of the answer of ``/v2/models/NAME/stats``."""
    inferences = executions = requests = queue = compute = 0
    batches: Counter[int] = Counter()
    for version in said["model_stats"]:
        spent = version["inference_stats"]
        inferences += int(version["inference_count"])
        executions += int(version["execution_count"])
        requests += int(spent["queue"]["count"])
        queue += int(spent["queue"]["ns"])
        compute += sum(int(spent[part]["ns"]) for part in _COMPUTE)
        for batch in version.get("batch_stats", []):
            batches[int(batch["batch_size"])] += int(batch["compute_infer"]["count"])
    return Counts(inferences, executions, requests, queue, compute, batches)


def read_metrics(text: str, model: str) -> dict[tuple[str, str], float]:
    """Samples of our families with the label ``model``, added up over instances."""
    sums: dict[tuple[str, str], float] = {}
    for line in text.splitlines():
        match = _SAMPLE.match(line) if line.startswith("jitney_") else None
        if match is not None:
            labels = dict(_LABEL.findall(match[2]))
            if labels.get("model") == model:
                key = (match[1], labels.get("le", ""))
                sums[key] = sums.get(key, 0.0) + float(match[3])
    return sums


def stages(before: Snapshot, after: Snapshot) -> tuple[Stage, ...]:
    """What each model did in between; nothing for one that was not read both times, or that began
    to count anew."""
    made = []
    for name, late in after.stages.items():
        early = before.stages.get(name)
        if early is None or late.requests < early.requests or late.executions < early.executions:
            continue
        requests = late.requests - early.requests
        made.append(
            Stage(
                model=name,
                inferences=late.inferences - early.inferences,
                executions=late.executions - early.executions,
                queue_s=(late.queue_ns - early.queue_ns) * 1e-9 / requests if requests else None,
                compute_s=(
                    (late.compute_ns - early.compute_ns) * 1e-9 / requests if requests else None
                ),
                batches=dict(sorted((late.batches - early.batches).items())),
            )
        )
    return tuple(made)


def engine_work(before: Snapshot, after: Snapshot) -> EngineWork | None:
    """What our engine did in between; None if the model has no metrics of ours, or began to count
    anew."""
    if before.metrics is None or not after.metrics:
        return None
    early, late = before.metrics, after.metrics
    gained = {key: value - early.get(key, 0.0) for key, value in late.items()}
    bounds = sorted(
        float(le) for name, le in late if name == "jitney_batch_sequences_bucket" and le != "+Inf"
    )
    counted = [gain for (name, _), gain in gained.items() if name.endswith(_COUNTERS)]
    if not bounds or not all(gain >= 0 for gain in counted):  # NaN is not, either
        return None
    by_bound = {
        float(le): value
        for (name, le), value in gained.items()
        if name == "jitney_batch_sequences_bucket"
    }
    steps = gained["jitney_batch_sequences_count", ""]
    reached = [by_bound[bound] for bound in bounds] + [steps]
    queued = gained.get(("jitney_queue_seconds_count", ""), 0.0)
    return EngineWork(
        steps=steps,
        batch_bounds=tuple(bounds),
        batch_steps=tuple(
            upper - lower for lower, upper in zip([0.0, *reached], reached, strict=False)
        ),
        mean_batch=gained["jitney_batch_sequences_sum", ""] / steps if steps else None,
        queue_s=gained["jitney_queue_seconds_sum", ""] / queued if queued else None,
        prompt_tokens=gained.get(("jitney_prompt_tokens_total", ""), 0.0),
        generated_tokens=gained.get(("jitney_generated_tokens_total", ""), 0.0),
        hit_tokens=gained.get(("jitney_prefix_hit_tokens_total", ""), 0.0),
        preemptions=gained.get(("jitney_preemptions_total", ""), 0.0),
    )
