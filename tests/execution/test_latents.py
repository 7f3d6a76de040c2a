"""Latents in the cache: one row a token, the same result in each form, and faults that a load
sees."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from jitney.batch import Row
from jitney.engine.assemble import load_model, load_runner, weigh
from jitney.errors import UnsupportedModelError
from jitney.execution import latents, memory
from jitney.execution.attention import AttentionMetadata, build_metadata
from jitney.execution.interface import AttentionCall, LayerSpec, kind_of_cache
from jitney.execution.latents import LatentAttention, UpProjections
from jitney.execution.probe import probe_row
from jitney.read_config import make_config
from torch import Tensor, nn

from tests.execution.like_generate import make_type, options_for, prove_paged
from tests.execution.test_attention_kinds import SHARED_INDEX, SPARSE
from tests.execution.test_served_types import MLA

RANK = 32
ROTARY = 8
KEY = 12
VALUE = 20
HEADS = 4
BLOCK_SIZE = 4


def projections() -> UpProjections:
    """Random ones, as of a layer of transformers."""
    torch.manual_seed(0)
    return UpProjections(
        SimpleNamespace(
            kv_lora_rank=RANK,
            qk_rope_head_dim=ROTARY,
            qk_nope_head_dim=KEY,
            v_head_dim=VALUE,
            kv_b_proj=nn.Linear(RANK, HEADS * (KEY + VALUE), bias=False),
            kv_a_layernorm=nn.LayerNorm(RANK),
        )
    )


def rows(*spans: tuple[int, int, list[int]]) -> list[Row]:
    """Rows that compute tokens [start, end) of a sequence with these blocks."""
    return [
        probe_row(prompt=[0] * end, start=start, count=end - start, block_table=table)
        for start, end, table in spans
    ]


class Sequences:
    """Three sequences: one ends with a chunk of 6, two with a single token."""

    spans = ((3, 9, [4, 1, 5]), (6, 7, [2, 3]), (1, 2, [7]))

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        torch.manual_seed(1)
        self.up = projections()
        spec = LayerSpec(HEADS, 1, RANK + ROTARY, None, value_size=0, has_latents=True)
        (self.cache,) = memory.make_layer_caches(
            [spec], [LatentAttention()], BLOCK_SIZE, dtype, torch.device("cpu"), 8
        )
        self.tokens = [torch.randn(end, RANK + ROTARY) for _, end, _ in self.spans]

    def call(self, tokens: Tensor, query: Tensor) -> AttentionCall:
        key = tokens[:, None]
        return AttentionCall(0, query, key, key[..., :RANK], scale=0.2, latents=self.up)

    def run(self, attend: LatentAttention, query: Tensor) -> Tensor:
        """What comes before the spans is written first, then the spans attend."""
        before = rows(*[(0, start, table) for start, _, table in self.spans])
        meta = build_metadata(before, BLOCK_SIZE)
        written = torch.cat(
            [of[:start] for of, (start, _, _) in zip(self.tokens, self.spans, strict=True)]
        )
        attend(self.call(written, torch.zeros(len(written), HEADS, KEY + ROTARY)), self.cache, meta)
        new = torch.cat(
            [of[start:] for of, (start, _, _) in zip(self.tokens, self.spans, strict=True)]
        )
        return attend(
            self.call(new, query), self.cache, build_metadata(rows(*self.spans), BLOCK_SIZE)
        )

    def expected(self, query: Tensor) -> Tensor:
        """By the keys and values of each sequence alone."""
        results = []
        first = 0
        for of, (start, end, _) in zip(self.tokens, self.spans, strict=True):
            own = torch.einsum("hkr,cr->hck", self.up.key_up, of[:, :RANK])
            keys = torch.cat((own, of[None, :, RANK:].expand(HEADS, -1, -1)), -1)
            values = torch.einsum("cr,hrv->hcv", of[:, :RANK], self.up.value_up)
            part = query[first : first + end - start].transpose(0, 1)
            first += end - start
            scores = part @ keys.transpose(1, 2) * 0.2
            seen = torch.ones(end, end).tril()[start:].bool()
            weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
            results.append((weights @ values).transpose(0, 1))
        return torch.cat(results)


def some_query() -> Tensor:
    return torch.randn(8, HEADS, KEY + ROTARY, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("most_absorbed", [0, 100])
@pytest.mark.parametrize("batch_invariant", [False, True])
@torch.inference_mode()
def test_each_form_is_attention_over_keys_and_values(
    monkeypatch: pytest.MonkeyPatch, most_absorbed: int, batch_invariant: bool
) -> None:
    monkeypatch.setattr(latents, "_most_absorbed", lambda _: most_absorbed)
    sequences = Sequences()
    got = sequences.run(LatentAttention(batch_invariant), some_query())
    torch.testing.assert_close(got, sequences.expected(some_query()), rtol=1e-4, atol=1e-4)


@torch.inference_mode()
def test_a_cache_of_bytes() -> None:
    sequences = Sequences(torch.int8)
    got = sequences.run(LatentAttention(), some_query())
    assert (got - sequences.expected(some_query())).norm() < 0.05 * got.norm()


@torch.inference_mode()
def test_batch_invariant_has_the_same_bits_alone_and_in_chunks() -> None:
    attend = LatentAttention(batch_invariant=True)
    together = Sequences().run(attend, some_query())
    alone = Sequences()
    alone.spans = alone.spans[:1]
    alone.tokens = alone.tokens[:1]
    assert torch.equal(alone.run(attend, some_query()[:6]), together[:6])
    later = Sequences()
    later.spans = ((8, 9, [4, 1, 5]),)
    later.tokens = later.tokens[:1]
    assert torch.equal(later.run(attend, some_query()[5:6]), together[5:6])


def test_a_token_is_one_row(tmp_path: Path) -> None:
    """In the ledger, too."""
    runner = load_runner(make_config(options_for(make_type(tmp_path, "deepseek_v3", **MLA))))
    info = runner.info
    runner.close()
    padded = 32  # rank 16 and rotary 8
    assert info.kv_cache_bytes == info.num_blocks * 16 * 2 * padded * 4


def test_an_index_has_a_row_more_where_it_is_not_shared(tmp_path: Path) -> None:
    model = load_model(make_config(options_for(make_type(tmp_path, "glm_moe_dsa", **SHARED_INDEX))))
    assert [(spec.head_size, spec.cached_value_size) for spec in model.layers] == [
        (24, 16),
        (24, 0),
    ]
    assert kind_of_cache(model.layers, has_states=False) == "indexed"
    of_latents = [replace(spec, value_size=0) for spec in model.layers]
    assert kind_of_cache(of_latents, has_states=False) == "latents"


def _next_slots(write: object) -> object:
    def write_next(new: Tensor, cache: Tensor, meta: AttentionMetadata, scale: object) -> None:
        slots = (meta.slot_mapping + 1) % (len(cache) * meta.block_size)
        latents.write_slots(new, cache, slots, meta.block_size, scale)

    return write_next


@pytest.mark.parametrize("fields", [MLA, SPARSE], ids=["latents", "sparse"])
def test_latents_at_the_wrong_row_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fields: dict[str, object]
) -> None:
    model_type = "deepseek_v32" if fields is SPARSE else "deepseek_v3"
    folder = make_type(tmp_path, model_type, **fields)
    monkeypatch.setattr(latents, "write", _next_slots(latents.write))
    with pytest.raises(UnsupportedModelError, match="away from those of"):
        prove_paged(folder)


def test_index_keys_at_the_wrong_row_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With few tokens chosen, so that the proof at load sees the choice."""
    folder = make_type(tmp_path, "deepseek_v32", **{**SPARSE, "index_topk": 2})
    prove_paged(folder)
    write_slots = latents.write_slots

    def write_elsewhere(new: Tensor, cache: Tensor, slots: Tensor, *more: object) -> None:
        write_slots(new, cache, slots.flip(0), *more)

    monkeypatch.setattr(latents, "write_slots", write_elsewhere)
    with pytest.raises(UnsupportedModelError, match="away from those of"):
        prove_paged(folder)


def test_adapters_keep_keys_and_values(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """An adapter may change the product that latents make a part of others. A load and a plan say
    what that costs."""
    folder = make_type(tmp_path / "m", "deepseek_v3", **MLA)
    adapters = tmp_path / "adapters"
    adapters.mkdir()
    config = make_config(options_for(folder, adapters=str(adapters)))
    model = load_model(config)
    assert [spec.num_kv_heads for spec in model.layers] == [4, 4]
    with_latents = load_model(make_config(options_for(folder)))
    kept = memory.block_bytes(model.layers, 1, model.dtype)
    times = kept / memory.block_bytes(with_latents.layers, 1, model.dtype)
    assert times > 5
    assert f"the cache takes {times:.1f} times as many bytes" in caplog.text
    assert weigh(config).expansion == times
    without = weigh(make_config(options_for(folder)))
    assert without.expansion == 1.0
    assert weigh(config).block == times * without.block


@pytest.mark.parametrize("option", ["adapters", "batch_invariant"])
def test_an_index_is_opaque(tmp_path: Path, option: str) -> None:
    """It chooses among latents, which an adapter may change, and whose scores depend on the batch
    in their last bits."""
    folder = make_type(tmp_path / "m", "deepseek_v32", **SPARSE)
    value = str(tmp_path) if option == "adapters" else True
    config = make_config(options_for(folder, **{option: value}))
    assert load_model(config).opaque is not None
    assert weigh(config).cache == "opaque"
