"""What the server itself counts while a load is on it: read before and after, then subtracted.

The server's statistics have the work of its models. That of a Jitney engine is in its metrics
alone, because the server has no queue before such a model.
"""

import re
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from jitney.errors import JitneyError

from jitney_measure.record import EngineWork, Stage
from jitney_measure.target import Model, Target, model_path

_SAMPLE = r'^jitney_(\w+_(?:total|count|sum))\{[^}]*?\bmodel="%s".*\} (\S+)$'
_COMPUTE = ("compute_input", "compute_infer", "compute_output")


@dataclass
class Snapshot:
    """All that is read at one time; only differences mean anything."""

    models: dict[str, Counter[str]] = field(default_factory=dict)  # the server's statistics
    engine: Counter[str] | None = None
    """The engine's metrics; None if they could not be read, or it is no language model."""
    missing: list[str] = field(default_factory=list)  # what could not be read and why


def snapshot(target: Target, model: Model) -> Snapshot:
    """Does not raise if the server refuses: the measurement goes on without."""
    taken = Snapshot()
    try:
        for name in model.parts:
            answer = target.get(model_path(name, "stats"))
            taken.models[name] = read_statistics(answer)
    except (JitneyError, LookupError, TypeError) as error:
        taken.missing.append(f"no statistics of the server ({error})")
    try:
        if model.language:
            taken.engine = read_metrics(target.metrics_text(), model.name)
    except (JitneyError, ValueError) as error:
        taken.missing.append(f"no figures of the engine ({error})")
    return taken


def read_statistics(answer: dict[str, Any]) -> Counter[str]:
    """Adds up the versions in the answer of ``/v2/models/NAME/stats``."""
    total: Counter[str] = Counter()
    for version in answer["model_stats"]:
        spent = version["inference_stats"]
        total["inferences"] += version["inference_count"]
        total["executions"] += version["execution_count"]
        total["requests"] += spent["queue"]["count"]
        total["queue"] += spent["queue"]["ns"]
        total["compute"] += sum(spent[part]["ns"] for part in _COMPUTE)
    return total


def read_metrics(text: str, model: str) -> Counter[str]:
    """Our counters of the model, added up over instances."""
    total: Any = Counter()  # of floats
    for name, value in re.findall(_SAMPLE % re.escape(model), text, re.MULTILINE):
        total[name] += float(value)
    return total


def stages(before: Snapshot, after: Snapshot) -> tuple[Stage, ...]:
    """What each model did between the two."""
    found = []
    for name, counts in after.models.items():
        # If the first reading failed, nothing can be said: the stage has zeros.
        gained = counts - before.models.get(name, counts)
        found.append(
            Stage(
                model=name,
                inferences=gained["inferences"],
                executions=gained["executions"],
                mean_batch=_mean(gained, "inferences", "executions"),
                queue_s=_mean(gained, "queue", "requests", 1e-9),
                compute_s=_mean(gained, "compute", "requests", 1e-9),
            )
        )
    return tuple(found)


def engine_work(before: Snapshot, after: Snapshot) -> EngineWork | None:
    """What our engine did between the two; None if the model has no metrics of ours, or if one of
    the readings failed."""
    if before.engine is None or after.engine is None:
        return None
    gained = after.engine - before.engine
    if not gained["batch_sequences_count"]:
        return None
    return EngineWork(
        steps=gained["batch_sequences_count"],
        mean_batch=_mean(gained, "batch_sequences_sum", "batch_sequences_count"),
        queue_s=_mean(gained, "queue_seconds_sum", "queue_seconds_count"),
        prompt_tokens=gained["prompt_tokens_total"],
        generated_tokens=gained["generated_tokens_total"],
        hit_tokens=gained["prefix_hit_tokens_total"],
        preemptions=gained["preemptions_total"],
    )


def _mean(gained: Counter[str], total: str, count: str, scale: float = 1.0) -> float | None:
    """None if nothing was counted."""
    return gained[total] * scale / gained[count] if gained[count] else None
