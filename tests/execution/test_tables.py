"""Block tables on the device by differences: whatever comes and goes, they end up whole."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jitney.execution.gpu.tables import DeviceTables, TableUpdates

ROWS, COLUMNS = 6, 40


class Device:
    """What the kernel does with updates."""

    def __init__(self) -> None:
        self.tables = np.full((ROWS, COLUMNS), -1)

    def apply(self, updates: TableUpdates, tables: list[list[int]]) -> None:
        """Write what is new, then compare every table of the step whole."""
        assert len(set(updates.places.tolist())) == len(tables)
        for place, first, count, offset in zip(
            updates.places, updates.first, updates.counts, updates.offsets, strict=True
        ):
            self.tables[place, first : first + count] = updates.values[offset : offset + count]
        for place, table in zip(updates.places, tables, strict=True):
            assert self.tables[place, : len(table)].tolist() == table


def test_only_what_is_new_is_sent() -> None:
    kept, device = DeviceTables(ROWS), Device()
    first, second = [5, 6, 7], [8]
    updates = kept.update([first, second])
    device.apply(updates, [first, second])
    assert updates.values == [5, 6, 7, 8]
    assert kept.update([second, first]).values == []
    second.append(9)
    updates = kept.update([second, first])
    device.apply(updates, [second, first])
    assert (updates.values, updates.counts.tolist()) == ([9], [1, 0])


def test_an_equal_list_is_another_table() -> None:
    """After a preemption a sequence has a new list, whatever it holds."""
    kept, device = DeviceTables(ROWS), Device()
    table = [1, 2]
    device.apply(kept.update([table]), [table])
    again = table.copy()
    updates = kept.update([again])
    device.apply(updates, [again])
    assert updates.values == [1, 2]


def test_the_row_longest_not_seen_is_reused() -> None:
    kept = DeviceTables(3)
    a, b, c, d = [1], [2], [3], [4]
    kept.update([a, b, c])
    kept.update([c, a])
    assert kept.update([d]).values == [4]  # in b's place
    assert kept.update([a, c, d]).values == []
    assert kept.update([b]).values == [2]


def test_the_identity_of_a_list_cannot_pass_to_another() -> None:
    """A list that is gone elsewhere is kept as long as its row, so no new one is taken for it."""
    kept, device = DeviceTables(ROWS), Device()
    for number in range(200):
        table = [number, number + 1]
        updates = kept.update([table])
        device.apply(updates, [table])
        assert len(updates.values) == 2
        del table


def test_forgetting_sends_everything_again() -> None:
    kept, device = DeviceTables(ROWS), Device()
    tables = [[1, 2], [3]]
    kept.update(tables)  # and the step fails before it is written
    kept.forget()
    device.apply(kept.update(tables), tables)


def test_a_table_that_shrinks_is_our_bug() -> None:
    kept = DeviceTables(ROWS)
    table = [1, 2]
    kept.update([table])
    table.pop()
    with pytest.raises(AssertionError, match="shrank"):
        kept.update([table])


def test_more_rows_than_the_device_has() -> None:
    with pytest.raises(AssertionError, match="more rows"):
        DeviceTables(2).update([[1], [2], [3]])


_STEPS = st.lists(
    st.tuples(
        st.sets(st.integers(0, 9), min_size=1, max_size=ROWS),  # the sequences of the step
        st.randoms(use_true_random=False),
        st.sampled_from(["run", "run", "run", "fail"]),
    ),
    max_size=30,
)


@given(_STEPS)
@settings(max_examples=200, deadline=None)
def test_whatever_comes_and_goes(steps) -> None:
    """Sequences grow, are preempted, end and come back; steps fail. Each step that is made leaves
    the whole of its tables on the device."""
    kept, device = DeviceTables(ROWS), Device()
    sequences: dict[int, list[int]] = {}
    for names, random, end in steps:
        tables = []
        for name in names:
            table = sequences.setdefault(name, [])
            if len(table) > COLUMNS - 4 or random.random() < 0.1:
                table = sequences[name] = []
            table += [random.randrange(1000) for _ in range(random.randrange(4))]
            tables.append(table)
        random.shuffle(tables)
        updates = kept.update(tables)
        if end == "fail":
            kept.forget()
        else:
            device.apply(updates, tables)
