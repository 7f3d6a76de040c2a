"""The paged KV manager: which block belongs to whom, what it holds and what may be overwritten.

Owned and called by the scheduler alone. It deals in block numbers; the memory behind them is the
runner's. A block is in exactly one of three states:

- *referenced*: its reference count is above 0. Each block table that holds the block is one
  reference, and so is each pending copy of which it is the source;
- *cached*: nobody references it, but its content can still be found by its hash. Such blocks are
  evicted in the order in which they were released (LRU);
- *free*: it holds nothing that could be found.

Only full blocks carry a hash: sha256 over the parent block's hash and the block's tokens. The chain
begins at a root made from the tenant's salt and the adapter. So equal hashes mean equal tokens from
position 0 on, and tenants with different salts never share a block. A block gets its hash only
after the step that filled it, so that nobody reads what is not yet written.
"""

import hashlib
from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Sequence

_CHECKED_AT_ONCE = 2048  # blocks between two pauses of the checks of integrity
# States of a block, for checks of integrity.
_REFERENCED = 0
_FREE = 1
_CACHED = 2


def root_hash(salt: str | None, adapter: str = "") -> bytes:
    """Where the chain of a tenant and adapter begins. The length of each field is hashed before it,
    so that no two lists of fields give the same bytes."""
    # The first field tells an empty salt from a missing one.
    fields = [b"", b""] if salt is None else [b"salt", salt.encode("utf-8", "surrogatepass")]
    fields.append(adapter.encode())
    digest = hashlib.sha256(b"jitney")
    for part in fields:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.digest()


def block_hash(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """The hash of a full block that follows the block (or root) of hash ``parent``."""
    return hashlib.sha256(parent + array("I", token_ids).tobytes()).digest()


class KvCache:
    """Block numbers 0 … ``num_blocks`` − 1, ``block_size`` tokens each.

    Every operation that can run out of blocks changes nothing when it does.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        assert num_blocks >= 1
        assert block_size >= 1
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._refs = [0] * num_blocks
        self._hash_of: list[bytes | None] = [None] * num_blocks
        self._block_of: dict[bytes, int] = {}
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack: the warmest block first
        self._cached: OrderedDict[int, None] = OrderedDict()  # the least recently released first
        self._pending_copies: dict[int, int] = {}  # destination -> source of copies not yet made

    # ------------------------------------------------------------------ queries

    @property
    def num_available(self) -> int:
        """Blocks that an allocation may take: free and cached ones."""
        return len(self._free) + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Blocks that nobody references but that can be found by their hash."""
        return len(self._cached)

    @property
    def num_used(self) -> int:
        """Referenced blocks."""
        return self.num_blocks - self.num_available

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold ``num_tokens`` tokens."""
        return -(-num_tokens // self.block_size)

    def find(self, hashes: Iterable[bytes]) -> list[int]:
        """The blocks of the longest prefix of the chain ``hashes`` that is still here."""
        found = []
        for key in hashes:
            block = self._block_of.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def num_available_without(self, blocks: Iterable[int]) -> int:
        """How many blocks an allocation may take if it takes none of ``blocks``."""
        return self.num_available - self._num_unreferenced(blocks)

    def _num_unreferenced(self, blocks: Iterable[int]) -> int:
        return len([block for block in blocks if not self._refs[block]])

    def references_of(self, table: list[int]) -> list[int]:
        """The blocks to which references would be given up with ``table``."""
        blocks = list(table)
        for block in table:
            source = self._pending_copies.get(block)
            if source is not None:
                # The block is the destination of a pending copy, and in no other table. If this
                # table is given up, the copy is cancelled, and its reference to the source is given
                # up with it.
                blocks.append(source)
        return blocks

    def num_references(self, block: int) -> int:
        """How many tables and pending copies hold a block."""
        return self._refs[block]

    def pending_copies(self) -> list[tuple[int, int]]:
        """(source, destination) of all copies that the next step must make before it writes."""
        return [(source, destination) for destination, source in self._pending_copies.items()]

    # ------------------------------------------------------------------ tables

    def allocate(self, hits: list[int], num_new: int, spare: int = 0) -> list[int] | None:
        """A new table: ``hits`` (from :meth:`find`) shared, then ``num_new`` blocks of its own.

        None, and nothing changed, unless ``spare`` blocks would still be free afterwards.
        """
        # A hit that nobody references is no longer free when it is shared.
        num_taken = self._num_unreferenced(hits) + num_new
        if self.num_available < num_taken + spare:
            return None
        for block in hits:  # first of all, so that no hit is evicted for its own table
            if self._refs[block] == 0:
                del self._cached[block]
            self._refs[block] += 1
        return hits + [self._take() for _ in range(num_new)]

    def grow(self, table: list[int]) -> bool:
        """Append one block to ``table``. False, and nothing changed, if there is none."""
        if not self._free and not self._cached:
            return False
        table.append(self._take())
        return True

    def fork(self, table: list[int], num_tokens: int, *, share: bool = True) -> list[int] | None:
        """A second table over the first ``num_tokens`` tokens of ``table``, all of it written.

        Full blocks are shared; a partial last one gets a block of its own and a pending copy.
        Without ``share`` that holds for full blocks, too. Until a copy is made its source is held,
        so that it is not reused even if ``table`` ends. None, and nothing changed, if too few
        blocks are free.
        """
        num_shared = num_tokens // self.block_size if share else 0
        copied = table[num_shared : self.blocks_for(num_tokens)]
        forked = table[:num_shared]
        if self.num_available < len(copied):
            return None
        for block in forked:
            self._refs[block] += 1
        for source in copied:
            destination = self._take()
            self._pending_copies[destination] = source
            self._refs[source] += 1
            forked.append(destination)
        return forked

    def complete_copies(self, copies: Iterable[tuple[int, int]]) -> None:
        """These pending copies have been made: their sources are no longer held for them."""
        for source, destination in copies:
            expected = self._pending_copies.pop(destination)
            assert source == expected, "a copy was made that was not pending"
            self._dereference(source)

    def release(self, table: list[int]) -> None:
        """Give up a table, its last block first: tails are evicted before the heads they need."""
        for block in reversed(table):
            self._dereference(block)

    def cache_block(self, block: int, key: bytes) -> None:
        """From now on the full ``block`` can be found by ``key``, the hash of its chain.

        If another block can be found by that key already, this one is not noted.
        """
        assert self._refs[block] > 0, "a block was cached that nobody holds"
        assert self._hash_of[block] is None, "a block was cached twice"
        if key not in self._block_of:
            self._block_of[key] = block
            self._hash_of[block] = key

    # ------------------------------------------------------------------ single blocks

    def _take(self) -> int:
        """A block for new content: a free one, else the cached one that was released first."""
        if self._free:
            block = self._free.pop()
        else:
            block, _ = self._cached.popitem(last=False)
            key = self._hash_of[block]
            assert key is not None
            del self._block_of[key]
            self._hash_of[block] = None
        self._refs[block] = 1
        return block

    def _dereference(self, block: int) -> None:
        """Remove a reference to a block. With the last one, a pending copy *to* the block is
        cancelled, and its source is no longer held for it."""
        refs = self._refs[block] - 1
        assert refs >= 0, "a block was released that nobody held"
        self._refs[block] = refs
        if refs:
            return
        if self._hash_of[block] is None:
            self._free.append(block)
        else:
            self._cached[block] = None
        if self._pending_copies and block in self._pending_copies:
            self._dereference(self._pending_copies.pop(block))

    # ------------------------------------------------------------------ integrity

    def check_integrity(self, tables: Iterable[tuple[list[int], int]]) -> None:
        """Assert every invariant, given all live tables and how many leading tokens of each are
        written. Its cost is that of all blocks and tables."""
        for _ in self.integrity_checks(tables):
            pass

    def integrity_checks(self, tables: Iterable[tuple[list[int], int]]) -> Iterator[None]:
        """:meth:`check_integrity` with a pause after every ``_CHECKED_AT_ONCE`` blocks. If
        anything changes in a pause, the rest must not be run."""
        owners = self._count_owners(tables)
        # At first each block counts as referenced. Then the free and cached ones are marked.
        states = bytearray([_REFERENCED]) * self.num_blocks
        for state, blocks in ((_FREE, self._free), (_CACHED, self._cached)):
            for count, block in enumerate(blocks):
                if count % _CHECKED_AT_ONCE == 0:
                    yield
                assert states[block] == _REFERENCED, "a block is free or cached twice"
                states[block] = state
        num_hashed = 0
        for block in range(self.num_blocks):
            if block % _CHECKED_AT_ONCE == 0:
                yield
            self._check_block(block, states[block], owners.get(block, 0))
            if self._hash_of[block] is not None:
                num_hashed += 1
        assert num_hashed == len(self._block_of), "a hash finds a block whose own hash differs"

    def _count_owners(self, tables: Iterable[tuple[list[int], int]]) -> Counter[int]:
        """Check tables and pending copies, and count how many of both hold each block."""
        owners: Counter[int] = Counter()
        sources = Counter(self._pending_copies.values())
        for table, num_written in tables:
            assert len(set(table)) == len(table), "a table names a block twice"
            owners.update(table)
            for block in table[num_written // self.block_size :]:
                # References held for pending copies do not count. The owner of a copy's source may
                # go on writing to it, because a step makes its copies before it writes.
                num_tables = self._refs[block] - sources[block]
                assert num_tables == 1, f"writable block {block} is shared"
                assert self._hash_of[block] is None, f"writable block {block} has a hash"
        for destination in self._pending_copies:
            assert owners[destination] == 1, f"a copy is pending to the free block {destination}"
        owners.update(sources)
        return owners

    def _check_block(self, block: int, state: int, owned: int) -> None:
        """``owned``: by how many tables and pending copies the block is held."""
        refs = self._refs[block]
        key = self._hash_of[block]
        assert refs == owned, f"block {block}: {refs} references, {owned} owners"
        is_referenced = state == _REFERENCED
        assert is_referenced == (refs > 0), f"block {block} is lost, or free and owned"
        if state == _FREE:
            assert key is None, "a free block has a hash"
        if state == _CACHED:
            assert key is not None, "a cached block has no hash"
        if key is not None:
            assert self._block_of.get(key) == block, f"block {block} is not found by its hash"


class WouldFree:
    """Which blocks would be free if some tables were given up, one after the other. Nothing is
    freed."""

    def __init__(self, kv: KvCache) -> None:
        self._kv = kv
        self._given_up: Counter[int] = Counter()  # references, by block

    def give_up(self, table: list[int]) -> list[int]:
        """The blocks that would become free if this table were given up too, besides all tables of
        earlier calls. A block that several tables share becomes free with the last of them."""
        blocks = self._kv.references_of(table)
        self._given_up.update(blocks)
        given_up = self._given_up
        return [block for block in set(blocks) if given_up[block] == self._kv.num_references(block)]
