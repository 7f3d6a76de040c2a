"""Attention over latents (MLA), fused: its products, norms and rotary embedding in few kernels, and
attention itself by a kernel that reads latents. Built by ``fuse``.

``execution.latents`` says what is computed. transformers' modules rotate either the halves of a
head or its pairs of neighbours (``rope_interleave``), and give halves in both cases. So where pairs
are rotated, the outputs of the products are put in the order of halves.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from jitney.execution.interface import AttentionCall, PagedFunction
from jitney.execution.latents import UpProjections
from jitney.kernels.fused.forms import FusedNorm, LatentForm, LatentKernel, Misfit, Rotation
from jitney.kernels.fused.products import filled_up, with_outputs
from jitney.kernels.fused.rotary import AngleColumns, CosSin, whole_rotary

_CHILDREN = {"kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj", "o_proj"}
_QUERY = {"q_proj"}
_QUERY_OF_LOW_RANK = {"q_a_proj", "q_a_layernorm", "q_b_proj"}


class LatentProducts(NamedTuple):
    """The products of such an attention, in the order in which fused ones give their results."""

    query: nn.Module
    """Of the input, or of ``query_norm(query_low(input))``."""
    latent: list[nn.Module]
    """[rank, rotary size] of each token, filled up."""


def is_latent_attention(module: nn.Module) -> bool:
    """Whether it has the parts of an attention over latents, which the cache keeps, and no more."""
    children = dict(module.named_children())
    if not isinstance(children.get("kv_b_proj"), UpProjections):
        return False
    return children.keys() in (_CHILDREN | _QUERY, _CHILDREN | _QUERY_OF_LOW_RANK)


def latent_form(call: AttentionCall, norm: FusedNorm) -> LatentForm:
    """What an attention computes that makes this call. ``norm`` is that of the latents."""
    latents = call.latents
    if latents is None or call.token_index is not None:
        raise Misfit("it does not attend over latents alone")
    if call.softcap is not None or call.sinks is not None:
        raise Misfit("no kernel over latents has a softcap or sinks")
    _, heads, head_size = call.query.shape
    return LatentForm(
        layer=call.layer,
        heads=heads,
        key_size=head_size - latents.rotary_size,
        scale=call.scale,
        window=call.window,
        latents=latents,
        norm=norm.form,
    )


def latent_products(
    children: Mapping[str, nn.Module], form: LatentForm, rotation: Rotation
) -> LatentProducts:
    """The products of the attention with these children. ``rotation`` is that of transformers'
    module."""
    query = children.get("q_proj", children.get("q_b_proj"))
    latent: Any = children["kv_a_proj_with_mqa"]
    assert query is not None
    rotary_size = form.latents.rotary_size
    if rotation == "neighbours":
        halves = torch.arange(rotary_size).view(-1, 2).T.flatten()
        own = torch.arange(form.key_size)
        of_head = torch.cat((own, form.key_size + halves))
        heads = torch.arange(form.heads)[:, None] * len(of_head)
        query = with_outputs(query, (heads + of_head).flatten())
        rank = form.latents.rank
        latent = with_outputs(latent, torch.cat((torch.arange(rank), rank + halves)))
    return LatentProducts(query, filled_up([latent]))


class FusedLatents(nn.Module):
    """An attention over latents."""

    rotation: Rotation = "halves"
    """That of cos and sin as :meth:`mix` takes them."""

    def __init__(
        self,
        form: LatentForm,
        kernel: LatentKernel,
        query: nn.Module,
        latent: nn.Module,
        output: nn.Module,
        query_low: nn.Module | None,
        query_norm: FusedNorm | None,
        columns: AngleColumns,
        own_rotation: Rotation,
    ) -> None:
        """``query_low`` and ``query_norm``: where queries are made by two products, the first and
        the norm between them. ``columns``: which the model's rotary module gives. ``own_rotation``:
        that of transformers' module, by which the products were put in order."""
        super().__init__()
        self.form = form
        self.kernel: LatentKernel = kernel
        self.query = query
        self.latent = latent
        self.output = output
        self.query_low = query_low
        self.query_norm = query_norm
        self.columns = columns
        self.own_rotation: Rotation = own_rotation

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: CosSin,
        *args: object,
        paged: PagedFunction,
        **unused: object,
    ) -> tuple[Tensor, None]:
        """As transformers calls it."""
        attended = self.mix(hidden_states[0], self.angles(position_embeddings), paged)
        return self.output(attended).unsqueeze(0), None

    def angles(self, made: CosSin) -> CosSin:
        """cos and sin as :meth:`mix` takes them, of those that the rotary module made."""
        return whole_rotary(made, self.columns, self.rotation)

    def mix(self, x: Tensor, cos_sin: CosSin, paged: PagedFunction) -> Tensor:
        """All but the output product, of x [T, hidden size] and cos and sin [T, R]. Returns
        [T, heads * value size]."""
        low = x
        if self.query_low is not None:
            assert self.query_norm is not None
            low = self.query_norm(self.query_low(x))
        attended = self.kernel(self.query(low), self.latent(x), *cos_sin, paged)
        return attended.reshape(x.shape[0], -1)
