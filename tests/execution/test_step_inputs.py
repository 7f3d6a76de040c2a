"""A step's inputs as the device gets them: equal to those built from whole tables on the host."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from jitney.execution.attention import build_metadata
from jitney.request import Row
from jitney.sampling_params import SamplingParams

pytest.importorskip("triton")
from jitney.execution.gpu.device import HostDevice
from jitney.execution.gpu.step import Shape, StepInputs

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="interpreted on a CPU")

BLOCK, MAX_ROWS, MAX_TOKENS, MAX_BLOCKS = 4, 8, 64, 700


def row(tokens: list[int], start: int, table: list[int], carried: int | None = None) -> Row:
    return Row(
        key=0,
        index=0,
        token_ids=tokens,
        start=start,
        block_table=table,
        sample=(0,),
        params=SamplingParams(seed=0),
        prompt=[1],
        output=[],
        stop_ids=frozenset(),
        bad_words_ids=[],
        carried=carried,
    )


def make_inputs() -> StepInputs:
    return StepInputs(
        HostDevice(),
        max_rows=MAX_ROWS,
        max_tokens=MAX_TOKENS,
        max_blocks=MAX_BLOCKS,
        block_size=BLOCK,
        last_block=9999,
    )


def load(inputs: StepInputs, rows: list[Row], padded: int = 0, sampled=None, **more) -> Shape:
    lengths = [len(each.token_ids) for each in rows]
    ends = [each.end for each in rows]
    shape = Shape(len(rows), sum(lengths), max(lengths), max(ends))
    inputs.load(rows, lengths, [each.start for each in rows], **more)
    inputs.prepare(shape, max(padded, len(rows)), sampled)
    return shape


def check(inputs: StepInputs, rows: list[Row], shape: Shape, ids: list[int] | None = None) -> None:
    """Everything that the step reads, against the host's own."""
    expected = build_metadata(rows, BLOCK)
    meta = inputs.metadata(shape)
    for name in ("query_start", "context_len", "slot_mapping", "positions"):
        got, right = getattr(meta, name), getattr(expected, name)
        assert got.dtype == right.dtype
        assert got.tolist() == right.tolist(), name
    assert (meta.max_query_len, meta.max_context_len) == (
        expected.max_query_len,
        expected.max_context_len,
    )
    for r, each in enumerate(rows):
        blocks = -(-each.end // BLOCK)
        assert meta.block_table[r, :blocks].tolist() == each.block_table[:blocks]
    flat = [token for each in rows for token in each.token_ids]
    assert inputs.ids[: shape.num_tokens].tolist() == (ids or flat)


def test_prompts_and_decodes() -> None:
    inputs = make_inputs()
    rows = [row([7], 5, [3, 9]), row([1, 2, 3, 4, 5], 3, [8, 2, 6]), row([4], 0, [5])]
    check(inputs, rows, load(inputs, rows))


def test_tables_longer_than_one_stride() -> None:
    """A program covers a part of a table's columns; blocks beyond what the step uses are kept."""
    inputs = make_inputs()
    table = [int(n) for n in np.random.default_rng(0).permutation(600)]
    long = row([5], 590 * BLOCK, table)
    short = row([6, 7, 8], 2, [1, 2, 3])
    check(inputs, [short, long], load(inputs, [short, long]))
    table += [7000, 7001, 7002]
    rows = [row([5, 6, 7], 600 * BLOCK - 1, table), short]
    check(inputs, rows, load(inputs, rows))
    rows = [row([5], 602 * BLOCK + 1, table)]  # in blocks that came two steps ago
    check(inputs, rows, load(inputs, rows))


def test_carried_tokens_come_from_the_step_before() -> None:
    inputs = make_inputs()
    sampled = torch.tensor([11, 22, 33])
    rows = [row([0], 4, [0, 1], carried=2), row([9], 2, [2]), row([0], 0, [3], carried=0)]
    check(inputs, rows, load(inputs, rows, sampled=sampled), ids=[33, 9, 11])
    mixed = [row([0], 5, [0, 1], carried=1), row([5, 6], 0, [4])]
    check(inputs, mixed, load(inputs, mixed, sampled=sampled), ids=[22, 5, 6])


def test_padding_writes_nothing_and_sees_nothing() -> None:
    inputs = make_inputs()
    full = [row([n + 1], n, [n, n + 10]) for n in range(MAX_ROWS)]
    check(inputs, full, load(inputs, full))
    rows = [row([7], 5, [3, 9]), row([8], 0, [4])]
    check(inputs, rows, load(inputs, rows, padded=5))
    meta = inputs.metadata(Shape(5, 5, 1, 2800))
    assert meta.query_start.tolist() == [0, 1, 2, 3, 4, 5]
    assert meta.context_len.tolist() == [6, 1, 0, 0, 0]
    assert meta.slot_mapping.tolist()[2:] == [-1, -1, -1]
    assert meta.positions.tolist()[2:] == [0, 0, 0]
    assert inputs.ids[2:5].tolist() == [0, 0, 0]
    inputs.clear()
    assert inputs.metadata(Shape(MAX_ROWS, MAX_ROWS, 1, 8)).context_len.tolist() == [0] * MAX_ROWS


def test_what_else_travels_with_a_step() -> None:
    inputs = make_inputs()
    rows = [row([7, 8], 0, [3]), row([4], 0, [5])]
    copies = [(1, 2), (3, 4), (5, 6)]
    shape = load(inputs, rows, wanted=[1, 2], sources=[0, 0, 1], copies=copies)
    check(inputs, rows, shape)
    assert inputs.wanted().tolist() == [1, 2]
    assert inputs.sources().tolist() == [0, 0, 1]
    assert inputs.copies().tolist() == [[1, 3, 5], [2, 4, 6]]
    assert {inputs.wanted().dtype, inputs.copies().dtype} == {torch.int64}


def test_more_than_the_host_array_holds() -> None:
    """Long tables that are all new at once: the arrays grow, and steps go on in them."""
    inputs = make_inputs()
    for begin in (0, 5000):
        rows = [
            row([n], 0, list(range(begin + n, begin + n + MAX_BLOCKS))) for n in range(MAX_ROWS)
        ]
        check(inputs, rows, load(inputs, rows))
    rows = [row([3], 1, rows[0].block_table)]
    check(inputs, rows, load(inputs, rows))


def test_after_a_failure_tables_are_sent_whole() -> None:
    inputs = make_inputs()
    rows = [row([7], 5, [3, 9])]
    inputs.load(rows, [1], [5])  # and before it is unpacked something raises
    inputs.forget()
    check(inputs, rows, load(inputs, rows))


def test_a_table_too_long_for_the_device() -> None:
    inputs = make_inputs()
    with pytest.raises(AssertionError, match="too long"):
        load(inputs, [row([1], 0, [0] * (MAX_BLOCKS + 1))])


_STEPS = st.lists(
    st.lists(
        st.tuples(st.integers(0, 11), st.integers(1, 9), st.integers(0, 2)),
        min_size=1,
        max_size=5,
        unique_by=lambda each: each[0],
    ),
    min_size=1,
    max_size=8,
)


@given(_STEPS, st.randoms(use_true_random=False))
@settings(max_examples=40, deadline=None)
def test_any_steps(steps, random) -> None:
    """Sequences in any order, chunk sizes and with blocks to spare; some start again."""
    inputs = make_inputs()
    tables: dict[int, list[int]] = {}
    lengths: dict[int, int] = {}
    for step in steps:
        rows = []
        for name, count, spare in step:
            if name not in tables or random.random() < 0.2:
                tables[name], lengths[name] = [], 0
            table, start = tables[name], lengths[name]
            need = -(-(start + count) // BLOCK) + spare - len(table)
            table += [random.randrange(9999) for _ in range(need)]
            rows.append(row([random.randrange(1000) for _ in range(count)], start, table))
            lengths[name] = start + count
        check(inputs, rows, load(inputs, rows))


def test_no_memory_for_a_longer_array_costs_neither_of_the_two(monkeypatch) -> None:
    """What could not be sent can be sent again, and whatever fits goes on."""
    inputs = make_inputs()
    short = row([7], 0, [1])
    long = row([5], 4 * 650 - 1, list(range(650)))
    others = [replace(long, block_table=[*long.block_table]) for _ in range(MAX_ROWS - 1)]

    def fail(count: int) -> torch.Tensor:
        raise torch.OutOfMemoryError(f"{count} numbers")

    for _ in range(3):
        with monkeypatch.context() as patch:
            patch.setattr(inputs._device, "staging", fail)
            with pytest.raises(torch.OutOfMemoryError):
                load(inputs, [long, *others])
            inputs.forget()  # as the runner does
        check(inputs, [short], load(inputs, [short]))
    check(inputs, [long, *others], load(inputs, [long, *others]))


def test_a_token_is_taken_from_a_step_that_sampled_it_or_not_at_all() -> None:
    inputs = make_inputs()
    rows = [row([0], 3, [5], carried=1), row([9], 2, [6])]
    for sampled in (None, torch.tensor([4])):
        with pytest.raises(AssertionError, match="no step before it sampled"):
            load(inputs, rows, sampled=sampled)
        inputs.forget()
    check(inputs, rows, load(inputs, rows, sampled=torch.tensor([4, 8])), ids=[8, 9])
