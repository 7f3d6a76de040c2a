"""What a step's attention is told of its rows."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from jitney.execution.attention import BlockTables, build_metadata

from tests.kernels.attention.rows import row

BLOCK_SIZE = 4


def test_metadata_of_a_mixed_batch():
    rows = [row([7, 3], 0, 5), row([9, 2, 4], 8, 9), row([1], 2, 4)]
    meta = build_metadata(rows, 4)
    assert meta.query_start.tolist() == [0, 5, 6, 8]
    assert meta.context_len.tolist() == [5, 9, 4]
    assert meta.block_table.tolist() == [[7, 3, 0], [9, 2, 4], [1, 0, 0]]
    assert meta.positions.tolist() == [0, 1, 2, 3, 4, 8, 2, 3]
    assert meta.slot_mapping.tolist() == [28, 29, 30, 31, 12, 16, 6, 7]
    assert (meta.max_query_len, meta.max_context_len, meta.num_rows) == (5, 9, 3)
    assert [x.dtype for x in (meta.query_start, meta.context_len, meta.block_table)] == [
        torch.int32
    ] * 3
    assert meta.slot_mapping.dtype == torch.int64


def test_metadata_leaves_out_blocks_held_in_reserve():
    assert build_metadata([row([7, 3, 5], 0, 4)], 4).block_table.tolist() == [[7]]


@given(
    steps=st.lists(
        st.lists(st.lists(st.integers(0, 99), min_size=1, max_size=9), min_size=1, max_size=5),
        min_size=1,
        max_size=6,
    )
)
def test_tables_kept_between_steps_are_those_made_anew(steps: list[list[list[int]]]) -> None:
    """Whatever came before: rows that grow, shrink, change in the middle, come and go."""
    kept, highest = BlockTables(), 0
    for tables in steps:
        highest = max([highest, *(max(table) for table in tables)])
        rows = [
            row(table, BLOCK_SIZE * len(table) - 1, BLOCK_SIZE * len(table)) for table in tables
        ]
        meta = build_metadata(rows, BLOCK_SIZE, tables=kept)
        width = max(len(table) for table in tables)
        assert meta.block_table.tolist() == [t + [0] * (width - len(t)) for t in tables]
        assert meta.slot_mapping.tolist() == [BLOCK_SIZE * t[-1] + BLOCK_SIZE - 1 for t in tables]
        assert meta.last_block == highest


def test_a_table_that_grows_in_place_is_noticed() -> None:
    """The scheduler's own lists come, and change between steps."""
    kept, table = BlockTables(), [3]
    build_metadata([row(table, 0, 4)], BLOCK_SIZE, tables=kept)
    table.append(8)
    assert build_metadata([row(table, 4, 5)], BLOCK_SIZE, tables=kept).block_table.tolist() == [
        [3, 8]
    ]
    table[0] = 5
    assert build_metadata([row(table, 5, 6)], BLOCK_SIZE, tables=kept).block_table.tolist() == [
        [5, 8]
    ]
