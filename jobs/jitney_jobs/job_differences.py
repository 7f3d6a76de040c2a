"""What differs between the settings of two runs of a job."""

from collections.abc import Sequence
from typing import Any

import msgspec
from jitney.errors import show

from jitney_jobs.job import CHANGEABLE_IN_ENGINE, Job, absolute_paths

_MOST_SHOWN = 5


def differences(before: Job, now: Job) -> list[str]:
    """The settings that shape the output and differ: ``prompt was 'a', is 'b'``."""
    # Journals of earlier versions have the tokenizer's path as it was given.
    before = msgspec.structs.replace(before, **absolute_paths(before))
    old = _flat(before)
    new = _flat(now)
    return [
        f"{name} was {show(old.get(name))}, is {show(new.get(name))}"
        for name in {**old, **new}
        if old.get(name) != new.get(name)
    ]


def _flat(job: Job) -> dict[str, Any]:
    """The settings that shape the output, with each of the engine's options by itself:
    ``engine.dtype``."""
    fields = job.fields_that_shape_output
    for name, value in fields.pop("engine").items():
        if name not in CHANGEABLE_IN_ENGINE:
            fields[f"engine.{name}"] = value
    return fields


def differences_text(found: Sequence[str]) -> str:
    """The first of some differences, and how many more there are."""
    text = "; ".join(found[:_MOST_SHOWN])
    more = len(found) - _MOST_SHOWN
    return f"{text}; and {more:,} more" if more > 0 else text
