"""The space of a model out of its current setting, the options and the defaults. Pure."""

from collections.abc import Mapping
from typing import Any

from jitney.errors import InvalidArgumentError
from jitney.tune import candidates
from jitney.tune.setting import BATCH, INSTANCES, SEQUENCES, TOKENS, WINDOW, Axis, Setting, Space
from jitney.tune.subject import Subject

_SCHEDULER = ("batch_sizes", "windows", "instances")
_ENGINE = ("max_num_seqs", "token_budgets")
_ROWS, _PROMPTS = ("shape",), ("prompts", "natural_end")
"""Options of the requests that the other kind of model has no use for."""
_MOST_INSTANCES = 64
_MOST_SEQUENCES, _MOST_TOKENS = 65536, 1 << 24


def check_options(subject: Subject, given: Mapping[str, Any]) -> None:
    """Raise InvalidArgumentError for an axis that the model does not have, or for requests that
    are not of its kind."""
    foreign, own = (_SCHEDULER, _ENGINE) if subject.language else (_ENGINE, _SCHEDULER)
    kind = "a language model" if subject.language else "no language model"
    for name in foreign:
        if given[name]:
            raise InvalidArgumentError.of(
                name, given[name],
                f"left out: {subject.name} is {kind}, whose axes are {', '.join(own)}",
            )  # fmt: skip
    for name in _ROWS if subject.language else _PROMPTS:
        if given[name]:
            shown = " ".join(given[name]) if isinstance(given[name], list) else str(given[name])
            raise InvalidArgumentError.of(name, shown, f"left out: {subject.name} is {kind}")
    if given["instances"] and not subject.counts_instances:
        raise InvalidArgumentError.of(
            "instances", given["instances"],
            f"left out: {subject.name} has {len(subject.config.instance_group)} instance groups, "
            f"which are left as they are",
        )  # fmt: skip


def scheduler_space(
    current: Setting,
    given: Mapping[str, Any],
    max_batch: int,
    tightest_s: float | None,
    cores: int,
    *,
    counts: bool = True,
) -> Space:
    """Batch size, window and instances. ``counts``: whether instances can be changed."""
    batch, window, instances = current
    text = given["batch_sizes"]
    batches = Axis(
        BATCH,
        candidates.whole("batch_sizes", text, 1, max_batch, ", max_batch_size")
        if text
        else candidates.batch_sizes(batch, max_batch),
        bool(text),
    )
    text = given["windows"]
    windows = Axis(
        WINDOW,
        candidates.windows("windows", text)
        if text
        else candidates.default_windows(window, tightest_s),
        bool(text),
    )
    text = given["instances"]
    if not counts:
        counted = Axis(INSTANCES, (instances,), True)
    elif text:
        counted = Axis(INSTANCES, candidates.whole("instances", text, 1, _MOST_INSTANCES), True)
    else:
        counted = Axis(INSTANCES, candidates.instance_counts(instances, cores))
    return Space((batches, windows, counted), current)


def engine_space(
    current: Setting, given: Mapping[str, Any], *, greatest_load: float | None, gpu: bool
) -> Space:
    """max_num_seqs and the token budget."""
    sequences, tokens = current
    text = given["max_num_seqs"]
    first = Axis(
        SEQUENCES,
        candidates.whole("max_num_seqs", text, 1, _MOST_SEQUENCES)
        if text
        else candidates.sequence_counts(sequences, greatest_load),
        bool(text),
    )
    text = given["token_budgets"]
    second = Axis(
        TOKENS,
        candidates.whole("token_budgets", text, 1, _MOST_TOKENS)
        if text
        else candidates.token_budgets(tokens, gpu=gpu),
        bool(text),
    )
    return Space((first, second), current)
