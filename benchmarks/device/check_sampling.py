"""Part ``check-sampling``: the device's sampler draws what the CPU's draws from the same logits.

The cases are those of tests/sampling. Where a uniform falls on the border between two tokens, the
order of a sum decides: one draw of a hundred may differ.
"""

import sys
import types
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.device.environment import device_of
from benchmarks.device.supervise import Bench

_TESTS = Path(__file__).parents[2] / "tests"
LOGITS = ("normal", "flat", "ties", "sparse")
VOCAB = 128_256


def run(bench: Bench) -> None:
    """Every kind of parameters in one batch, over several kinds of logits; then what else a step
    relies on: 16 bits, log-probabilities, rows that are not finite, launches that do not wait."""
    device = device_of(bench)
    cases = _cases()
    vocab = 300 if bench.tiny else VOCAB
    kinds = list(cases.KINDS.values()) * (1 if bench.tiny else 4)
    pairs = cases.make_pairs(kinds)

    def check(name: str, holds: Callable[[], object]) -> None:
        bench.case(name, partial(_check, bench, name, holds), seconds=1 if bench.tiny else 8)

    for kind in LOGITS[:1] if bench.tiny else LOGITS:
        logits = cases.make_logits(kind, len(pairs), vocab)
        check(f"{kind} logits", partial(cases.check_agreement, device, logits, pairs))
    half = cases.make_logits("normal", len(pairs), vocab, seed=1).to(torch.bfloat16)
    check("bfloat16 logits", partial(cases.check_agreement, device, half, pairs))
    check("log-probabilities", partial(_logprobs, cases, device, vocab))
    check("not finite", partial(_not_finite, cases, device))
    if device.type == "cuda":
        check("launches wait for nothing", partial(_no_wait, cases, device, pairs, half.to(device)))


def _cases() -> Any:
    """The module ``tests.sampling.device_cases`` of this repository, whoever else's ``tests`` are
    installed."""
    package = types.ModuleType("tests")
    package.__path__ = [str(_TESTS)]
    sys.modules["tests"] = package
    return import_module("tests.sampling.device_cases")


def _check(bench: Bench, name: str, holds: Callable[[], object]) -> None:
    """A row that says whether ``holds`` raised nothing."""
    wrong = 0.0
    note = ""
    try:
        holds()
    except AssertionError as error:
        wrong = 1.0
        note = str(error)[:200]
    bench.add(name, value=wrong, unit="wrong", ratio=wrong, bar=0, at_most=True, note=note)


def _logprobs(cases: Any, device: torch.device, vocab: int) -> None:
    pairs = cases.make_pairs([{"logprobs": 5}, {"temperature": 0, "logprobs": 0}, {"top_k": 3}])
    logits = cases.make_logits("normal", len(pairs), vocab, seed=2)
    got = cases.sample(logits.to(device), pairs).wait()
    for one, other in zip(cases.sampled(logits, pairs), got, strict=True):
        assert cases.same(one, other), (one, other)


def _not_finite(cases: Any, device: torch.device) -> None:
    """A row of NaN is an error of that row; its neighbours are served."""
    pairs = cases.make_pairs([{"temperature": 0}] * 3)
    logits = cases.make_logits("normal", 3, 500)
    logits[1] = float("nan")
    results = cases.sample(logits.to(device), pairs).wait()
    assert [each.error is not None for each in results] == [False, True, False]


def _no_wait(cases: Any, device: torch.device, pairs: list, logits: Tensor) -> None:
    """torch raises where a launch makes the host wait; the first may allocate."""
    cases.sample(logits, pairs).wait()
    torch.cuda.synchronize(device)
    torch.cuda.set_sync_debug_mode("error")
    try:
        launched = [cases.sample(logits, pairs) for _ in range(2)]
    except RuntimeError as error:
        raise AssertionError(f"a launch waited: {error}") from error
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert launched[0].wait() == launched[1].wait()
