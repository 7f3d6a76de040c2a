"""Which rows an executor gets first: by prefix, by length, and in the end the long outputs."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jitney import LLM, SamplingParams
from jitney_jobs import executors
from jitney_jobs.feeder import Feeder
from jitney_jobs.generate import JobPrompt
from jitney_jobs.prepare import Item

from tests.tiny_models import make_checkpoint


class Lengths(executors.PassThrough):
    """Takes two rows at once, each a length, short ones first; notes what it got."""

    capacity = 2

    def __init__(self) -> None:
        super().__init__()
        self.got: list[int] = []

    def rank(self, prepared: int, is_last: bool) -> int:
        return -prepared if is_last else prepared

    def submit(self, key: int, prepared: int) -> None:
        self.got.append(prepared)
        super().submit(key, prepared)


def test_rows_that_come_later_do_not_pass_those_that_wait() -> None:
    """Otherwise the shortest and the longest would be passed by for ever, and what is left of them
    would be padded to whatever came last."""
    executor = Lengths()
    feeder = Feeder(executor, 0)
    keys = iter(range(99))

    def add(*lengths: int) -> None:
        for length in lengths:
            feeder.add(Item((0,), prepared=length, key=next(keys)))

    add(5, 3, 9, 1)
    feeder.step(False)
    add(2, 40, 30, 20)
    for _ in range(3):
        feeder.step(False)
    assert executor.got == [1, 3, 5, 9, 40, 30, 20, 2], "up, and down from where it was"
    add(6, 4, 8)
    feeder.step(False)
    add(9, 5)
    while len(feeder):
        feeder.step(True)
    assert executor.got[8:] == [4, 6, 9, 8, 5], "in the end all that is left is one generation"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("feeding") / "llama", "llama", tokenizer=True)


@pytest.fixture(params=["as they come", "ahead"])
def ahead(request: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[bool]:
    if request.param == "as they come":
        monkeypatch.setattr(executors.EngineExecutor, "rank", lambda *_: 0)
    return request.param == "ahead"


def figures(folder: Path, prompts: list[tuple[list[int], int]], **options: Any) -> dict[str, float]:
    """Of a run over (ids, tokens to make)."""
    plain = {"dtype": "float32", "device": "cpu", "attention": "reference", "threads": 1}
    with LLM(folder, **plain, max_model_len=128, **options) as llm:
        feeder = Feeder(executors.EngineExecutor(llm), 0)
        for key, (ids, count) in enumerate(prompts):
            params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
            prompt = JobPrompt(ids, params)
            feeder.add(Item((0,), prepared=prompt, key=key))
        while len(feeder):
            feeder.step(True)
        return llm.figures


def test_a_common_prefix_is_found_in_a_small_cache(folder: Path, ahead: bool) -> None:
    """Eight prefixes of four blocks each, shuffled; the cache holds eight blocks."""
    draw = random.Random(1)
    prefixes = [draw.choices(range(10, 200), k=64) for _ in range(8)]
    prompts = [(prefixes[i % 8] + draw.choices(range(10, 200), k=8), 2) for i in range(64)]
    draw.shuffle(prompts)
    found = figures(folder, prompts, max_num_seqs=2, kv_cache_bytes=1 << 16)
    assert found["prompt_tokens"] + found["cached_tokens"] == 64 * 72
    assert (found["cached_tokens"] > 3000) == ahead, found
    assert (found["steps"] < 90) == ahead, found


def test_long_outputs_start_early(folder: Path, ahead: bool) -> None:
    """So that the last ones do not run alone."""
    draw = random.Random(2)
    prompts = [(draw.choices(range(10, 200), k=8), 4) for _ in range(30)]
    prompts += [(draw.choices(range(10, 200), k=8), 60)]
    found = figures(folder, prompts, max_num_seqs=4, kv_cache_bytes=8 << 20)
    assert found["tokens"] == 30 * 4 + 60
    assert (found["steps"] < 70) == ahead, found


def test_more_rows_than_the_queue_of_their_tier_takes(folder: Path) -> None:
    prompts = [([10 + i], 4) for i in range(7)]
    tiers = [{"name": "short", "max_queued": 1}]
    found = figures(folder, prompts, max_num_seqs=2, kv_cache_bytes=8 << 20, tiers=tiers)
    assert found["tokens"] == 7 * 4, "no row was refused"


def test_a_row_that_generates_for_too_long_is_bad(folder: Path) -> None:
    """Its time counts from its first token: rows that wait are not slow."""
    plain = {"dtype": "float32", "device": "cpu", "attention": "reference", "threads": 1}
    with LLM(folder, **plain, max_model_len=256, max_num_seqs=1) as llm:
        executor = executors.EngineExecutor(llm, row_timeout_s=0.01)
        for key, count in enumerate([250, 250, 1]):
            params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
            executor.submit(key, JobPrompt([10 + key], params))
        ended: dict[int, Any] = {}
        while len(ended) < 3:
            ended |= dict(executor.step())
        assert "row_timeout (0.01 s)" in str(ended[0])
        assert "row_timeout (0.01 s)" in str(ended[1])
        assert len(ended[2].ids) == 1, "the engine goes on"


def test_an_output_that_may_fill_the_context_is_the_longest() -> None:
    """``max_tokens`` -1 is no small number: such a row must not run alone in the end."""
    lengths = [executors._length_class(max_tokens) for max_tokens in (1, 100, 1 << 20, -1)]
    assert lengths == sorted(lengths)
    assert lengths[-1] > lengths[-2]
