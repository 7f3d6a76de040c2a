"""The size of the KV cache, and what an impossible one is told."""

import errno
import mmap
from types import SimpleNamespace

import pytest
import torch
from jitney.errors import ConfigError
from jitney.execution.interface import LayerSpec
from jitney.execution.low_rank import Site
from jitney.execution.memory import (
    Needs,
    StepMemory,
    block_bytes,
    estimate_steps,
    make_layer_caches,
    plan_memory,
    resident_adapters_bytes,
)
from jitney.execution.reference import ReferenceAttention
from jitney.read_config import make_config

LAYERS = [LayerSpec(8, 2, 64, None), LayerSpec(8, 2, 64, 128), LayerSpec(8, 1, 256, None)]
CPU, GPU = torch.device("cpu"), torch.device("cuda")
GIB = 1 << 30


def plan(
    device: torch.device = CPU,
    available: int = 8 * GIB,
    length: int = 1 << 20,
    graphs: int = 0,
    adapters: int = 0,
    **options,
):
    config = make_config({"model": "m", **options})
    needs = Needs(
        device=device,
        max_model_len=length,
        weight_bytes=GIB,
        block_bytes=block_bytes(LAYERS, config.block_size, torch.bfloat16),
        steps=StepMemory(GIB // 2, graphs),
        adapter_bytes=adapters,
    )
    return plan_memory(config, needs, available)


def test_bytes_of_a_block() -> None:
    per_token = 2 * 2 * (2 * 64 + 2 * 64 + 256)
    assert block_bytes(LAYERS, 16, torch.bfloat16) == 16 * per_token
    assert block_bytes(LAYERS, 16, torch.float32) == 32 * per_token
    scales = 4 * 2 * (2 + 2 + 1)  # float32, of each KV head's key and value
    assert block_bytes(LAYERS, 16, torch.int8) == 8 * per_token + 16 * scales


def test_adapters_have_their_share() -> None:
    whole, less = (plan(adapters=size, kv_cache_fraction=1.0).cache for size in (0, GIB))
    assert GIB - (1 << 20) < whole - less < GIB + (1 << 20)
    assert plan(adapters=GIB, kv_cache_bytes=GIB).free == 8 * GIB - 2 * GIB - GIB // 2
    assert "adapters at most 1,024 MiB" in str(plan(adapters=GIB))
    with pytest.raises(ConfigError, match="for a step and adapters"):
        plan(adapters=5 * GIB, kv_cache_bytes=3 * GIB)
    sites = {"q": Site(100, 50), "v": Site(100, 20)}
    model = SimpleNamespace(sites=sites, dtype=torch.bfloat16)
    config = make_config({"model": "m", "max_adapters": 3, "max_adapter_rank": 8})
    assert resident_adapters_bytes(config, model, copied_rank=0) == 3 * 8 * 270 * 2
    assert resident_adapters_bytes(config, model, copied_rank=16) == 3 * (8 + 16) * 270 * 2


def test_explicit_bytes() -> None:
    ledger = plan(kv_cache_bytes=1_000_000)
    assert ledger.num_blocks == 1_000_000 // ledger.block_bytes
    assert ledger.cache == ledger.num_blocks * ledger.block_bytes <= 1_000_000
    assert ledger.free == 8 * GIB - ledger.cache - GIB // 2
    assert "KV cache 1 MiB" in str(ledger)


def test_defaults() -> None:
    assert 2 * GIB - plan().block_bytes < plan().cache <= 2 * GIB  # a quarter
    assert plan(available=64 * GIB).cache <= 4 * GIB
    assert plan(GPU).cache > 0.85 * 8 * GIB
    assert plan(GPU, available=2 * GIB).cache <= 1.5 * GIB  # a step must fit beside it
    assert plan(GPU, instances=2).num_blocks == pytest.approx(plan(GPU).num_blocks / 2, abs=1)
    fraction = plan(kv_cache_fraction=0.5).cache
    assert 4 * GIB - plan().block_bytes < fraction <= 4 * GIB


def test_the_next_engine_gets_a_cache_of_the_same_size() -> None:
    """Even if it finds a little less memory, and the first one took all that it might."""
    first = plan(GPU, available=2 * GIB, kv_cache_fraction=1.0)
    again = plan(GPU, available=2 * GIB - (16 << 20), kv_cache_bytes=first.cache)
    assert again.num_blocks == first.num_blocks
    with pytest.raises(ConfigError, match=r"kv_cache_bytes is .* at most .* free memory"):
        plan(GPU, available=GIB, kv_cache_bytes=first.cache)


def test_graphs_need_room_too() -> None:
    without, beside = plan(GPU, 2 * GIB), plan(GPU, 2 * GIB, graphs=GIB)
    assert 0 <= without.cache - beside.cache - GIB < beside.block_bytes
    assert 0 <= beside.free - 2 * GIB // 64 < beside.block_bytes
    assert "graphs at most about 1,024 MiB" in str(beside)
    assert "graphs" not in str(without)
    with pytest.raises(ConfigError, match=f"the free memory less {GIB + GIB // 2:,} for a step"):
        plan(GPU, 2 * GIB, graphs=GIB, kv_cache_bytes=GIB)


@pytest.mark.parametrize("size", [9 * GIB, 7.6 * GIB, 1 << 60])
def test_larger_than_memory(size: float) -> None:
    with pytest.raises(ConfigError, match=f"kv_cache_bytes is {int(size)}, but must be at most"):
        plan(kv_cache_bytes=int(size))


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"kv_cache_bytes": 1000}, "kv_cache_bytes is 1000"),
        ({"kv_cache_fraction": 1e-6}, "kv_cache_fraction is 1e-06"),
        ({}, "kv_cache_bytes is 0"),
    ],
)
def test_not_enough_for_one_block(options: dict[str, object], key: str) -> None:
    available = GIB // 2 if not options else GIB
    with pytest.raises(ConfigError, match=f"{key}, but must be enough for one block of 16"):
        plan(available=available, **options)


def test_activations_count_logits_of_sampled_rows_only() -> None:
    config = SimpleNamespace(hidden_size=64, intermediate_size=[128, 32])
    model = SimpleNamespace(config=config, vocab_size=1000, dtype=torch.bfloat16, states=None)
    small, large = (estimate_steps(model, 512, rows).activations for rows in (8, 16))
    assert large - small == 8 * 1000 * 6
    assert small == 512 * (4 * 64 + 3 * 128) * 2 + 8 * 1000 * 6


def test_a_kernel_without_huge_pages_gives_caches_too(monkeypatch: pytest.MonkeyPatch) -> None:
    class WithoutHugePages(mmap.mmap):
        def madvise(self, *_: int) -> None:
            raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(mmap, "mmap", WithoutHugePages)
    layers = [LayerSpec(num_heads=4, num_kv_heads=2, head_size=8, window=None)]
    (cache,) = make_layer_caches(
        layers=layers,
        attention=[ReferenceAttention()],
        block_size=16,
        dtype=torch.float32,
        device=CPU,
        num_blocks=3,
    )
    assert not cache.keys.any()
    assert not cache.values.any()


def plan_states(size: int, *, slot: int, blocks: bool = True, snapshots: bool = False, **options):
    config = make_config({"model": "m", "kv_cache_bytes": size, "max_num_seqs": 8, **options})
    needs = Needs(
        device=CPU,
        max_model_len=256,
        weight_bytes=GIB,
        block_bytes=1 << 10 if blocks else 0,
        steps=StepMemory(1 << 20),
        adapter_bytes=0,
        slot_bytes=slot,
        most_slots=8,
        keeps_snapshots=snapshots,
    )
    return plan_memory(config, needs, 8 * GIB)


def test_slots_are_as_many_as_sequences_may_run_and_share_the_cache_with_blocks() -> None:
    ledger = plan_states(1 << 20, slot=1 << 14)
    assert ledger.num_slots == 8
    assert ledger.num_blocks == (1 << 10) - 8 * 16
    assert ledger.cache == 1 << 20
    assert "in it 8 slots of 16,384 bytes" in str(ledger)


def test_slots_leave_blocks_for_the_sequences_that_hold_them() -> None:
    ledger = plan_states(1 << 20, slot=1 << 17)
    assert ledger.num_slots == 7
    assert ledger.num_blocks == (1 << 10) - 7 * 128
    # Blocks that cost nothing never limit what runs.
    ledger = plan_states(1 << 20, slot=1 << 18, blocks=False)
    assert ledger.num_slots == 4
    assert ledger.num_blocks == 4 * 256 // 16


def test_a_cache_without_room_for_one_slot_is_refused() -> None:
    with pytest.raises(ConfigError, match="a slot of 131,072 bytes and a block of 1,024"):
        plan_states(1 << 17, slot=1 << 17)
    assert plan_states((1 << 17) + (1 << 10), slot=1 << 17).num_slots == 1


def test_snapshots_have_a_share_and_leave_room_for_the_longest_sequence() -> None:
    ledger = plan_states(1 << 20, slot=1 << 14, snapshots=True)
    assert ledger.num_snapshots == 8
    assert ledger.num_slots == 8
    assert ledger.num_blocks == (1 << 10) - 16 * 16
    assert ledger.cache == 1 << 20
    assert "8 slots of 16,384 bytes and 8 more for snapshots" in str(ledger)
    assert plan_states(1 << 20, slot=1 << 15, snapshots=True).num_snapshots == 4
    assert plan_states(1 << 20, slot=1 << 10, snapshots=True).num_snapshots == 4 * 8
    assert plan_states(1 << 18, slot=1 << 18, snapshots=True, blocks=False).num_snapshots == 0
    assert plan_states(40 << 10, slot=1 << 12, snapshots=True).num_snapshots == 1
    # A sequence of 256 tokens takes 16 KiB and a slot.
    assert plan_states(20 << 10, slot=1 << 12, snapshots=True).num_snapshots == 0
    assert plan_states(19 << 10, slot=1 << 11, snapshots=True).num_snapshots == 0
    assert plan_states(17 << 10, slot=1 << 11, snapshots=True).num_snapshots == 1
    # Each snapshot may have the blocks of a sequence of its own.
    ledger = plan_states(1 << 20, slot=1 << 16, snapshots=True, blocks=False)
    assert (ledger.num_slots, ledger.num_snapshots) == (8, 2)
    assert ledger.num_blocks == 10 * 256 // 16
