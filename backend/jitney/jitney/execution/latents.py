"""Attention over latents (MLA): one row a token in the cache, from which all heads' keys and values
are made.

A layer of transformers makes them in ``expand_kv``, with its product ``kv_b_proj``.
:func:`use_latents` lets that method hand over the latents themselves, so that these are what
attention is called with. :class:`LatentAttention` attends over them in one of two forms:

- *absorbed*: the product is a part of query and result instead. Head h's query q meets the key
  ``key_up[h] @ latent`` as ``q @ key_up[h]`` meets the latent itself. So no key is ever made.
- *expanded*: keys and values of the whole context are made first. That is cheaper for many queries
  of one sequence, because a key is shorter than a latent.

With an index (``token_index``) each query sees chosen tokens only.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from jitney.execution.attention import AttentionMetadata
from jitney.execution.interface import (
    LATENTS,
    NAME,
    AttentionCall,
    Latents,
    LayerCache,
    LayerSpec,
    TokenIndex,
)
from jitney.execution.memory import block_bytes
from jitney.execution.quantized import float_inputs, is_linear, weight_of
from jitney.execution.reference import (
    StepRow,
    attend_in_slices,
    dequantized,
    gather,
    rows_of,
    write,
    write_slots,
)
from jitney.execution.token_index import use_index

_PARTS = ("expand_kv", "kv_b_proj", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim")
"""What an attention module of transformers has that attends over latents."""
_MOST_GATHERED = 1 << 18
"""Elements of latents that are gathered at once for rows of one token each: 1 MiB of float32, which
stays in a processor's cache until it is read."""


class UpProjections(nn.Module):
    """An ``interface.Latents``: what a layer's product ``kv_b_proj`` has for each head."""

    def __init__(self, attention: Any) -> None:
        """Of the attention module ``attention`` of transformers."""
        super().__init__()
        self.rank: int = attention.kv_lora_rank
        self.rotary_size: int = attention.qk_rope_head_dim
        self.value_size: int = attention.v_head_dim
        key_size: int = attention.qk_nope_head_dim
        dtype = attention.kv_a_layernorm.weight.dtype
        weight = _plain_weight(attention.kv_b_proj, self.rank, dtype)
        of_heads = weight.view(-1, key_size + self.value_size, self.rank)
        key_up, value_up = of_heads.split((key_size, self.value_size), dim=1)
        self.key_up: Tensor
        self.value_up: Tensor
        self.register_buffer("key_up", key_up, persistent=False)
        self.register_buffer("value_up", value_up.transpose(1, 2), persistent=False)

    def settle(self) -> None:
        """From now on these are no views of the layer's weight, and torch multiplies them as they
        are stored."""
        if _multiplies_slowly(self.key_up):
            self.float()
        self.key_up = self.key_up.contiguous()
        self.value_up = self.value_up.contiguous()


def use_latents(module: PreTrainedModel) -> list[nn.Module]:
    """Let the layers of ``module`` that attend over latents keep these in the cache. Returns their
    attention modules. transformers' own attention still works."""
    changed: list[nn.Module] = []
    for attention in module.modules():
        if not all(hasattr(attention, name) for name in _PARTS):
            continue
        layer: Any = attention
        # Not as a module of the layer's: the weights would be there twice.
        vars(layer)[LATENTS] = UpProjections(layer)
        layer.expand_kv = _HandOver(layer)
        use_index(layer)
        changed.append(layer)
    return changed


def keep_up_projections(attentions: list[nn.Module]) -> None:
    """Put the up-projections of these modules in place of ``kv_b_proj``, which no step needs.
    transformers' own attention works no more afterwards."""
    for attention in attentions:
        up: UpProjections = vars(attention)[LATENTS]
        up.settle()
        attention.kv_b_proj = up


def expansion(module: nn.Module, layers: Sequence[LayerSpec], dtype: torch.dtype) -> float:
    """How many times as much the cache takes for the layers of ``module`` that attend over latents,
    but keep keys and values (``layers``), as with latents. 1: there are none."""
    kept = []
    with_latents = []
    for attention in module.modules():
        if not all(hasattr(attention, name) for name in _PARTS):
            continue
        layer: Any = attention
        spec = layers[layer.layer_idx]
        if not spec.has_latents:
            kept.append(spec)
            size = layer.kv_lora_rank + layer.qk_rope_head_dim
            with_latents.append(
                replace(spec, num_kv_heads=1, head_size=size, value_size=0, has_latents=True)
            )
    if not kept:
        return 1.0
    return block_bytes(kept, 1, dtype) / block_bytes(with_latents, 1, dtype)


def _multiplies_slowly(weight: Tensor) -> bool:
    """Whether torch's products are faster in float32 than in the weight's dtype: in bfloat16, on a
    CPU without instructions for it."""
    if weight.device.type != "cpu" or weight.dtype != torch.bfloat16:
        return False
    return not torch.cpu.get_capabilities().get("avx512_bf16")


class _HandOver:
    """Takes the place of a layer's ``expand_kv``."""

    def __init__(self, layer: Any) -> None:
        self._layer = layer
        self._expand = layer.expand_kv

    def __call__(self, latents: Tensor, rotary: Tensor) -> tuple[Tensor, Tensor]:
        """For our attention the latents [1, 1, T, rank] and their rotary parts [1, 1, T, rotary
        size] as they are; for transformers' own, keys and values."""
        if self._layer.config._attn_implementation == NAME:
            return latents, rotary
        expanded: tuple[Tensor, Tensor] = self._expand(latents, rotary)
        return expanded


def _plain_weight(linear: nn.Module, inputs: int, dtype: torch.dtype) -> Tensor:
    """The weight [outputs, inputs] of a linear layer, which may be quantized, in ``dtype``."""
    if is_linear(linear):
        return weight_of(linear)
    like = next(each for each in [*linear.parameters(), *linear.buffers()])
    unit = torch.eye(inputs, device=like.device, dtype=dtype)
    with float_inputs(linear), torch.inference_mode():
        product: Tensor = linear(unit)
    return product.T.contiguous()


class LatentAttention:
    """The attention function ``latents``; see :class:`interface.AttentionFunction`."""

    name = "latents"

    def __init__(self, batch_invariant: bool = False) -> None:
        """``batch_invariant``: a token's result does not depend on what else the step computes.
        Then each query is computed by itself, in the absorbed form."""
        self._batch_invariant = batch_invariant

    def __call__(self, call: AttentionCall, cache: LayerCache, meta: AttentionMetadata) -> Tensor:
        """Write the latents to their slots, then attend; scores and sums in float32."""
        latents = call.latents
        assert latents is not None
        write(call.key, cache.keys, meta, cache.key_scale)
        tokens, heads, _ = call.query.shape
        out = call.query.new_empty((tokens, heads, latents.value_size))
        plan = self._plan(call, cache, meta)
        for r, row in plan.several:
            chosen = None
            if call.token_index is not None:
                chosen = _choose(call, call.token_index, r, row, cache, meta)
            out[row.tokens] = self._attend_row(call, latents, row, cache, meta, chosen)
        for group in plan.groups:
            out[group.indices] = _attend_group(call, latents, group, cache)
        return out

    def _plan(self, call: AttentionCall, cache: LayerCache, meta: AttentionMetadata) -> "_Plan":
        """What is the same for all layers of a kind in a step: made for the first of them."""
        has_index = call.token_index is not None
        key = (LatentAttention, self._batch_invariant, has_index, call.window, cache.keys.shape)
        plan = meta.plans.get(key)
        if plan is None:
            several = []
            single = []
            for r, row in enumerate(rows_of(meta)):
                if row.num_tokens > 1 or has_index or self._batch_invariant:
                    several.append((r, row))
                else:
                    single.append(row)
            groups = [_Group.of(rows, call.window, meta) for rows in _groups(single, cache)]
            plan = _Plan(several, groups)
            meta.plans[key] = plan
        assert isinstance(plan, _Plan)
        return plan

    def _attend_row(
        self,
        call: AttentionCall,
        latents: Latents,
        row: StepRow,
        cache: LayerCache,
        meta: AttentionMetadata,
        chosen: Tensor | None,
    ) -> Tensor:
        """Attention of one row: [its tokens, heads, value size]."""
        query = call.query[row.tokens]
        if chosen is not None and row.num_tokens == 1 and call.window is None:
            # Only these latents are read: that is what the index is for.
            kept = _gather_tokens(cache, row, chosen[0].sort().values, meta.block_size)
            return _absorbed(query, kept, call, latents)
        kept = _context(cache, row)
        if not self._batch_invariant:
            if row.num_tokens > _most_absorbed(latents):
                return _expanded(query, kept, call, latents, chosen)
            return _absorbed(query, kept, call, latents, chosen)
        before = row.context - row.num_tokens
        results = []
        for i in range(row.num_tokens):
            one = slice(i, i + 1)
            # A result of torch depends on the shape of the product: so the context of each query
            # ends at the query itself.
            seen = kept[: before + i + 1]
            of_one = None if chosen is None else chosen[one]
            results.append(_absorbed(query[one], seen, call, latents, of_one))
        return torch.cat(results)


class _Group(NamedTuple):
    """Rows of one token each that are computed at once."""

    rows: list[StepRow]
    indices: Tensor
    """int64 [rows]: their tokens in the step."""
    table: Tensor
    """int64 [rows, blocks]: those of each row's context, filled up with 0."""
    unseen: Tensor
    """bool [rows, 1, tokens of the blocks]: what is not in a row's context, or behind its
    window."""

    @classmethod
    def of(cls, rows: list[StepRow], window: int | None, meta: AttentionMetadata) -> "_Group":
        """The group of these rows."""
        device = meta.block_table.device
        longest = max(len(row.blocks) for row in rows)
        tables = [functional.pad(row.blocks, (0, longest - len(row.blocks))) for row in rows]
        context = torch.tensor([[row.context] for row in rows], device=device)
        positions = torch.arange(longest * meta.block_size, device=device)
        unseen = positions >= context
        if window is not None:
            unseen |= positions < context - window
        return cls(
            rows=rows,
            indices=torch.tensor([row.tokens.start for row in rows], device=device),
            table=torch.stack(tables),
            unseen=unseen[:, None],
        )


class _Plan(NamedTuple):
    """How the rows of a step are computed."""

    several: list[tuple[int, StepRow]]
    """Rows that are computed by themselves, each with its number in the step."""
    groups: list[_Group]


def _choose(
    call: AttentionCall,
    index: TokenIndex,
    number: int,
    row: StepRow,
    cache: LayerCache,
    meta: AttentionMetadata,
) -> Tensor:
    """What the queries of a row see: int64 [its tokens, k]."""

    def exchange(keys: Tensor) -> Tensor:
        slots = meta.slot_mapping[row.tokens]
        write_slots(keys[:, None], cache.values, slots, meta.block_size, cache.value_scale)
        context = gather(cache.values, row.blocks, cache.value_scale)[0, : row.context]
        return context[:, : keys.shape[1]].to(keys.dtype)

    return index.choose(number, row.tokens, row.context, exchange)


def _context(cache: LayerCache, row: StepRow) -> Tensor:
    """The latents of a row's context: float32 [context, rank + rotary + padding]."""
    return gather(cache.keys, row.blocks, cache.key_scale)[0, : row.context]


def _gather_tokens(cache: LayerCache, row: StepRow, tokens: Tensor, block_size: int) -> Tensor:
    """As :func:`_context`, of these tokens [k] of it alone."""
    kept = cache.keys[row.blocks[tokens // block_size], :, tokens % block_size]
    return dequantized(kept.transpose(0, 1), cache.key_scale)[0]


def _most_absorbed(latents: Latents) -> int:
    """The most queries of a row for which the absorbed form computes less than the expanded one.

    For each token of the context the absorbed form multiplies by its row once for the score and
    once for the result, with each query and head. The expanded form multiplies by a key and a
    value, which are shorter, but first makes them."""
    rank = latents.rank
    key_size = latents.key_up.shape[1]
    made = rank * (key_size + latents.value_size)
    saved_by_query = 2 * rank - key_size - latents.value_size
    return made // saved_by_query if saved_by_query > 0 else made


def _absorb(query: Tensor, latents: Latents) -> Tensor:
    """Queries [n, heads, head size] as they meet latents: float32 [n, heads, rank + rotary]."""
    for_key, for_rotary = query.split((latents.key_up.shape[1], latents.rotary_size), dim=-1)
    by_head = for_key.to(latents.key_up.dtype).transpose(0, 1)
    absorbed = torch.bmm(by_head, latents.key_up).transpose(0, 1)
    return torch.cat((absorbed.float(), for_rotary.float()), dim=-1)


def _values_of(mixed: Tensor, latents: Latents, dtype: torch.dtype) -> Tensor:
    """The results [n, heads, value size] of mixed latents [n, heads, rank]."""
    by_head = mixed.to(latents.value_up.dtype).transpose(0, 1)
    return torch.bmm(by_head, latents.value_up).transpose(0, 1).to(dtype)


def _absorbed(
    query: Tensor,
    kept: Tensor,
    call: AttentionCall,
    latents: Latents,
    chosen: Tensor | None = None,
) -> Tensor:
    """Attention of the last n of c tokens in the absorbed form: ``query`` [n, heads, head size],
    ``kept`` [c, …]. Returns [n, heads, value size]."""
    width = latents.rank + latents.rotary_size
    keys = kept[None, :, :width]
    values = kept[None, :, : latents.rank]
    mixed = attend_in_slices(_absorb(query, latents), keys, values, call, chosen)
    return _values_of(mixed, latents, query.dtype)


def _expanded(
    query: Tensor, kept: Tensor, call: AttentionCall, latents: Latents, chosen: Tensor | None
) -> Tensor:
    """As :func:`_absorbed`, in the expanded form."""
    heads = query.shape[1]
    rank = latents.rank
    of_tokens = kept[:, :rank].to(latents.key_up.dtype)
    own = torch.matmul(of_tokens, latents.key_up.transpose(1, 2)).float()  # [heads, c, key]
    shared = kept[:, rank : rank + latents.rotary_size].expand(heads, -1, -1)
    keys = torch.cat((own, shared), dim=-1)
    values = torch.matmul(of_tokens, latents.value_up).float()
    return attend_in_slices(query.float(), keys, values, call, chosen).to(query.dtype)


def _groups(rows: list[StepRow], cache: LayerCache) -> list[list[StepRow]]:
    """The rows of one token each, those of similar contexts together: the contexts of a group are
    gathered at once, each as long as the longest."""
    block_elements = cache.keys[0].numel()
    groups: list[list[StepRow]] = []
    for row in sorted(rows, key=lambda each: len(each.blocks)):
        group = groups[-1] if groups else []
        gathered = (len(group) + 1) * len(row.blocks) * block_elements
        fits = bool(group) and gathered <= _MOST_GATHERED
        if fits and len(row.blocks) <= 2 * len(group[0].blocks):
            group.append(row)
        else:
            groups.append([row])
    return groups


def _attend_group(
    call: AttentionCall, latents: Latents, group: _Group, cache: LayerCache
) -> Tensor:
    """The absorbed form for rows of one token each: [rows, heads, value size]."""
    if len(group.rows) == 1 or call.softcap is not None or call.sinks is not None:
        results = [
            _absorbed(call.query[row.tokens], _context(cache, row), call, latents)
            for row in group.rows
        ]
        return torch.cat(results)
    # [rows, blocks, 1, tokens, …] -> [rows, tokens of all blocks, …]
    kept = dequantized(cache.keys[group.table][:, :, 0], cache.key_scale).flatten(1, 2)
    width = latents.rank + latents.rotary_size
    query = _absorb(call.query[group.indices], latents)
    scores = torch.bmm(query, kept[..., :width].transpose(1, 2)) * call.scale
    scores = scores.masked_fill(group.unseen, float("-inf"))
    mixed = torch.bmm(torch.softmax(scores, dim=-1), kept[..., : latents.rank])
    return _values_of(mixed, latents, call.query.dtype)
