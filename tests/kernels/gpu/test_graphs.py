"""Which graph a decode step takes, what is captured when, and what cannot be."""

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from jitney.execution.attention import AttentionMetadata, build_metadata
from jitney.kernels.gpu.graphs import Capture, CaptureError, DecodeGraphs, Launch, padded_sizes
from jitney.messages import ModelInfo
from jitney.read_config import make_config

from tests.kernels.attention.rows import row

VOCABULARY = 50


@pytest.fixture(autouse=True)
def _as_a_runner_calls() -> Iterator[None]:
    with torch.inference_mode():
        yield


class FakeCapture:
    """Captures nothing: what it gives runs the work again."""

    def __init__(self) -> None:
        self.captures = 0
        self.replays = 0

    def __call__(self, work: Launch) -> Launch:
        work()  # the run before a capture
        self.captures += 1

        def replay() -> None:
            self.replays += 1
            work()

        return replay


def fail_to_capture(work: Launch) -> Launch:
    work()
    raise CaptureError("operation not permitted when stream is capturing")


class Model:
    """Logits that tell apart whatever a step of rows of one token may hold."""

    def __init__(self) -> None:
        self.rows: list[int] = []

    def __call__(self, ids: torch.Tensor, meta: AttentionMetadata, indices: torch.Tensor) -> Any:
        self.rows.append(len(ids))
        assert len(meta.query_start) == len(ids) + 1
        blocks = meta.block_table.gather(1, (meta.positions // meta.block_size)[:, None])[:, 0]
        real = meta.slot_mapping >= 0
        assert torch.equal(real, meta.context_len > 0)
        slots = blocks * meta.block_size + meta.positions % meta.block_size
        assert torch.equal(meta.slot_mapping[real], slots[real])
        assert torch.equal(meta.context_len[real], meta.positions[real] + 1)
        told = ids + 100 * meta.positions + 10_000 * meta.slot_mapping
        return told[indices, None] + torch.arange(VOCABULARY)


def info(tokens: int = 4096) -> ModelInfo:
    return ModelInfo(
        vocab_size=VOCABULARY, max_model_len=100, num_blocks=300, block_size=4, dtype="float32",
        eos_ids=frozenset(), device="cpu", attention="gpu", num_parameters=1,
        max_num_batched_tokens=tokens,
    )  # fmt: skip


def graphs(model: Model, capture: Capture, sizes: list[int]) -> DecodeGraphs:
    return DecodeGraphs(model, sizes, capture, info(), torch.device("cpu"))


def step(*contexts: int, new: int = 1) -> tuple[torch.Tensor, AttentionMetadata, torch.Tensor]:
    """Rows of ``new`` tokens each, the last of which gets logits."""
    tables = [[3 + i + 10 * b for b in range(-(-n // 4))] for i, n in enumerate(contexts)]
    rows = [row(table, n - new, n) for table, n in zip(tables, contexts, strict=True)]
    count = new * len(rows)
    return torch.arange(5, 5 + count), build_metadata(rows, 4), torch.arange(new - 1, count, new)


@pytest.mark.parametrize(
    ("option", "max_rows", "expected"),
    [
        (None, 1, [1]),
        (None, 5, [1, 2, 4, 5]),
        (None, 16, [1, 2, 4, 8, 16]),
        (None, 60, [1, 2, 4, 8, 16, 32, 48, 60]),
        ((9, 3, 3), 16, [3, 9]),
    ],
)
def test_sizes(option, max_rows: int, expected: list[int]) -> None:
    sizes = {} if option is None else {"cuda_graph_sizes": list(option)}
    config = make_config({"model": "any", "device": "cuda", "max_num_seqs": max_rows, **sizes})
    assert padded_sizes(config, info()) == expected
    if option is None:  # a step has no more rows than tokens
        assert padded_sizes(config, info(tokens=1)) == [1]


def test_large_steps_have_no_graph_by_default() -> None:
    config = make_config({"model": "any", "device": "cuda", "max_num_seqs": 4096})
    assert padded_sizes(config, info())[-1] == 512
    config = make_config({"model": "any", "device": "cuda", "cuda_graphs": "never"})
    assert padded_sizes(config, info()) == []


def test_a_step_is_padded_and_gets_its_own_logits() -> None:
    """Whatever the step before has left in the buffers."""
    capture, model, plain = FakeCapture(), Model(), Model()
    some = graphs(model, capture, [2, 4])
    for contexts in ((9, 12, 30, 7), (20,), (3, 11, 40), (1, 2), (99, 1, 5)):
        assert torch.equal(some(*step(*contexts)), plain(*step(*contexts)))
    # A graph's first step runs once before its capture and once as its replay.
    assert model.rows == [4, 4, 2, 2, 4, 2, 4]
    assert (capture.captures, sorted(some.graphs)) == (2, [2, 4])


def test_steps_that_have_no_graph() -> None:
    """More rows than any graph, chunks of prompts, rows of which some get no logits."""
    capture, plain = FakeCapture(), Model()
    some = graphs(lambda *given: plain(*given), capture, [2])
    ids, meta, indices = step(5, 9)
    for each in (step(4, 5, 6), (ids, meta, indices[:1])):
        assert torch.equal(some(*each), plain(*each))
    meta.max_query_len = 2
    assert torch.equal(some(ids, meta, indices), plain(ids, meta, indices))
    assert torch.equal(graphs(plain, capture, [])(*step(7)), plain(*step(7)))
    assert capture.captures == 0


def test_all_graphs_the_largest_first() -> None:
    """Over a step of padding; none is captured later."""
    capture, model = FakeCapture(), Model()
    some = graphs(model, capture, [1, 3, 8])
    some.capture_all()
    assert list(some.graphs) == [8, 3, 1]
    for rows in range(1, 9):
        some(*step(*[6] * rows))
    assert capture.captures == 3


def test_what_cannot_be_captured_runs_kernel_by_kernel(caplog: pytest.LogCaptureFixture) -> None:
    model, plain = Model(), Model()
    some = graphs(model, fail_to_capture, [1, 4])
    with caplog.at_level(logging.WARNING, logger="jitney"):
        for _ in range(2):
            assert torch.equal(some(*step(6, 8)), plain(*step(6, 8)))
        some.capture_all()
    assert model.rows == [4, 2, 2]  # tried once, then as it is
    assert [record.message for record in caplog.records] == [
        "decode steps run without CUDA graphs: operation not permitted when stream is capturing"
    ]


def test_a_step_that_raises_before_its_capture_costs_no_graphs() -> None:
    """A fault of the step's own is not taken for a module that cannot be captured."""
    faults, model = [True], Model()

    def forward(*given: Any) -> torch.Tensor:
        if faults and faults.pop():
            raise ValueError("the step's own")
        return model(*given)

    some = DecodeGraphs(forward, [4], FakeCapture(), info(), torch.device("cpu"))
    with pytest.raises(ValueError, match="own"):
        some(*step(2, 5))
    some(*step(2, 5))
    assert list(some.graphs) == [4]
