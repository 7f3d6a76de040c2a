"""The KV manager alone: who holds which block, what is found again, what is evicted first."""

import time

import pytest
from jitney.core.kv_cache import KvCache, block_hash, root_hash


def chain(*blocks: list[int], salt: str | None = None) -> list[bytes]:
    hashes = [root_hash(salt)]
    for tokens in blocks:
        hashes.append(block_hash(hashes[-1], tokens))
    return hashes[1:]


def filled(kv: KvCache, hashes: list[bytes]) -> list[int]:
    """A table whose blocks are cached under ``hashes``."""
    table = kv.allocate([], len(hashes))
    assert table is not None
    for block, key in zip(table, hashes, strict=True):
        kv.cache_block(block, key)
    return table


def test_hashes_depend_on_everything_before_and_on_salt_and_adapter() -> None:
    one, other = chain([1, 2], [3, 4]), chain([9, 9], [3, 4])
    assert one[1] != other[1]
    assert chain([1, 2], salt="a")[0] != chain([1, 2], salt="b")[0] != chain([1, 2])[0]
    assert root_hash(None) != root_hash("")
    assert root_hash("ab", "c") != root_hash("a", "bc")
    assert len({root_hash(salt, name) for salt in (None, "a") for name in ("", "b", "c")}) == 6
    assert chain([1, 2], [3, 4]) == one


def test_find_gives_the_longest_prefix() -> None:
    kv = KvCache(4, 2)
    hashes = chain([1, 2], [3, 4], [5, 6])
    table = filled(kv, hashes[:2])
    assert kv.find(hashes) == table
    assert kv.find(chain([3, 4])) == []
    assert kv.find([b"unknown", *hashes]) == []


def test_a_failed_allocation_changes_nothing() -> None:
    kv = KvCache(4, 2)
    hashes = chain([1, 2], [3, 4])
    kv.release(filled(kv, hashes))
    held = kv.allocate([], 1)
    assert held is not None
    before = (kv.num_available, kv.num_cached, kv.find(hashes))
    assert kv.allocate(kv.find(hashes), 2) is None  # 3 free, of which the hits are 2
    assert kv.allocate([], 3, spare=1) is None
    assert (kv.num_available, kv.num_cached, kv.find(hashes)) == before
    rest = kv.allocate([], 3)
    assert rest is not None
    assert not kv.grow(held)
    assert kv.fork(held, 1) is None
    kv.check_integrity([(held, 2), (rest, 6)])


def test_tails_are_evicted_before_heads_and_the_oldest_first() -> None:
    kv = KvCache(4, 2)
    old, new = chain([1, 2], [3, 4]), chain([5, 6], [7, 8])
    first, second = filled(kv, old), filled(kv, new)
    kv.release(first)
    kv.release(second)
    assert kv.num_cached == 4
    taken = kv.allocate([], 1)
    assert taken == first[1:]
    assert kv.find(old) == first[:1]
    more = kv.allocate([], 2)
    assert more == [first[0], second[1]]
    assert kv.find(new) == second[:1]


def test_a_hit_takes_a_block_out_of_the_cache_and_renews_its_age() -> None:
    kv = KvCache(3, 2)
    a, b = chain([1, 2]), chain([3, 4])
    kv.release(filled(kv, a))
    kv.release(filled(kv, b))
    table = kv.allocate(kv.find(a), 0)
    assert table is not None
    kv.check_integrity([(table, 2)])
    kv.release(table)
    assert kv.allocate([], 2) is not None  # the free one, then b's
    assert kv.find(b) == []
    assert kv.find(a) == table


def test_of_two_blocks_with_one_content_the_first_stays() -> None:
    kv = KvCache(3, 2)
    hashes = chain([1, 2])
    first, second = filled(kv, hashes), filled(kv, hashes)
    assert kv.find(hashes) == first
    kv.release(second)
    assert kv.num_cached == 0
    kv.release(first)
    assert kv.find(hashes) == first
    kv.check_integrity([])


def test_fork_shares_full_blocks_and_has_a_pending_copy_of_the_partial_one() -> None:
    kv = KvCache(6, 2)
    table = kv.allocate([], 3)
    assert table is not None
    fork = kv.fork(table, 5)
    assert fork is not None
    assert fork[:2] == table[:2]
    assert kv.pending_copies() == [(table[2], fork[2])]
    kv.check_integrity([(table, 5), (fork, 5)])
    kv.release(table)
    assert kv.num_available == 2  # the source is held although its owner is gone
    kv.complete_copies(kv.pending_copies())
    assert kv.num_available == 3
    kv.check_integrity([(fork, 5)])


def test_fork_at_a_block_boundary_copies_nothing() -> None:
    kv = KvCache(2, 2)
    table = kv.allocate([], 2)
    assert table is not None
    assert kv.fork(table, 4) == table
    assert kv.pending_copies() == []


def test_a_copy_to_a_released_block_is_no_longer_pending() -> None:
    kv = KvCache(2, 2)
    table = kv.allocate([], 1)
    assert table is not None
    fork = kv.fork(table, 1)
    assert fork is not None
    kv.release(fork)
    assert kv.pending_copies() == []
    kv.release(table)
    assert kv.num_available == 2
    kv.check_integrity([])


@pytest.mark.parametrize(
    "harm",
    [
        lambda kv, table: kv._free.append(table[0]),
        lambda kv, table: kv._refs.__setitem__(table[0], 2),
        lambda kv, table: table.append(table[0]),
        lambda kv, table: kv._free.pop(),
        lambda kv, table: kv._block_of.__setitem__(b"key", table[0]),
        lambda kv, table: kv._hash_of.__setitem__(table[1], b"key"),
    ],
)
def test_integrity_notices(harm) -> None:
    kv = KvCache(4, 2)
    table = filled(kv, chain([1, 2]))
    assert kv.grow(table)
    kv.check_integrity([(table, 3)])
    harm(kv, table)
    with pytest.raises(AssertionError):
        kv.check_integrity([(table, 3)])


@pytest.mark.parametrize(
    "fault",
    [
        lambda kv: kv._free.pop(0),
        lambda kv: kv._free.append(kv._free[0]),
        lambda kv: kv._free.append(next(iter(kv._cached))),
        lambda kv: kv._cached.popitem(),
        lambda kv: kv._refs.__setitem__(-1, 1),
        lambda kv: kv._refs.__setitem__(kv._free[-1], 1),
        lambda kv: kv._hash_of.__setitem__(kv._free[-1], b"x"),
        lambda kv: kv._hash_of.__setitem__(next(iter(kv._cached)), None),
        lambda kv: kv._block_of.popitem(),
        lambda kv: kv._block_of.__setitem__(b"x", 0),
        lambda kv: kv._block_of.__setitem__(next(iter(kv._block_of)), 7),
    ],
)
@pytest.mark.parametrize("num_blocks", [16, 5000])
def test_every_kind_of_fault_is_found(num_blocks: int, fault) -> None:
    kv = KvCache(num_blocks, 4)
    table = kv.allocate([], num_blocks // 2)
    assert table is not None
    for number, block in enumerate(table):
        kv.cache_block(block, str(number).encode())
    kv.release(table)
    kv.check_integrity([])
    fault(kv)
    with pytest.raises(AssertionError):
        kv.check_integrity([])


def test_a_slice_of_the_check_is_short_however_many_blocks_there_are() -> None:
    """So that a message which comes meanwhile does not wait for the whole check."""
    kv = KvCache(1 << 18, 16)
    shares = []
    for _ in range(3):  # the best: the machine may stop the thread within a slice
        slices = []
        started = time.thread_time()
        for _ in kv.integrity_checks([]):
            slices.append(time.thread_time() - started)
            started = time.thread_time()
        assert len(slices) >= 2 * (1 << 18) / 2048
        shares.append(max(slices) / sum(slices))
    assert min(shares) < 0.1
