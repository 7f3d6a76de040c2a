"""The experts of a layer by our own kernels (``expert_kernels``).

Called by ``layer_kernels``, which makes a :class:`FusedExperts` in place of a module of experts,
and by ``program_list``, where its kernels are steps of their own. Imported only where Numba is.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from jitney.kernels.cpu.column_linear import ColumnLinear
from jitney.kernels.cpu.compiled import Kernel, KernelCall
from jitney.kernels.cpu.emit import LANES
from jitney.kernels.cpu.expert_kernels import (
    GroupCall,
    RouteCall,
    choose_body,
    combine_body,
    gather_body,
    group_body,
    sort_body,
)
from jitney.kernels.cpu.product_call import ITEMS_PER_WEIGHT, ProductCall
from jitney.kernels.cpu.simd import BF16, F32
from jitney.kernels.fused.forms import RouterForm

_ITEMS_PER_EXPERT = ITEMS_PER_WEIGHT // 8
"""Most items of an expert: some experts are at work in each step."""


class RouteKernels(NamedTuple):
    """All kernels but the products, for one dtype."""

    choose: Kernel
    sort: Kernel
    gather: Kernel
    combine: Kernel


# ``typed``: as in ``column_linear``.
@lru_cache(typed=True)
def compiled_routes(tag: Any) -> RouteKernels:
    return RouteKernels(
        choose=Kernel(lambda address: choose_body(tag, address)),
        sort=Kernel(lambda address: sort_body(address)),
        gather=Kernel(lambda address: gather_body(tag, address)),
        combine=Kernel(lambda address: combine_body(tag, address)),
    )


@lru_cache(typed=True)
def compiled_group(tag: Any) -> Kernel:
    """The product of each expert, with weights of the tag's type."""
    return Kernel(lambda address: group_body(tag, address))


class RouteStep(NamedTuple):
    """A kernel of a mixture of experts."""

    kernel: Kernel
    arguments: KernelCall
    """All but ``count``."""
    rows_per_token: int
    """``count`` is so many times the number of tokens."""
    owned: object = None
    """Memory that the arguments point to, if nothing else owns it."""


@dataclass(frozen=True)
class ExpertMemory:
    """What the kernels of a mixture pass on, for at most ``tokens`` tokens with ``chosen`` pairs
    each (``expert_kernels``). All mixtures of a model may share one."""

    numbers: Tensor
    """[tokens, E filled up]: of the router."""
    expert_of_pair: Tensor
    score_of_pair: Tensor
    row_of_pair: Tensor
    token_of_row: Tensor
    segments: Tensor
    used: Tensor
    rows: Tensor
    """[tokens * chosen, H]: x of each pair, and then what the experts give for it."""
    inside: Tensor
    """[tokens * chosen, I]"""
    converted: Tensor
    """uint8: rows in another form before a product."""


class FusedExperts(nn.Module):
    """The sum of what a token's experts give, each times its score. An expert is
    ``down(activation(gate(x)) * up(x))``."""

    def __init__(self, gated: Sequence[ColumnLinear], down: Sequence[ColumnLinear]) -> None:
        """The products of each expert, which are all of the same sizes."""
        super().__init__()
        # With an underscore: what is public must be equal in layers that are alike.
        self._gated = list(gated)
        self._down = list(down)
        self.experts = len(gated)
        self.width = down[0].out_features
        self.inner_width = down[0].in_features
        tag = F32 if gated[0].dtype == torch.float32 else BF16
        self._routes = compiled_routes(tag)

    @property
    def converted_row_bytes(self) -> int:
        """The most bytes of a row that was converted for a product."""
        return max(self._gated[0].converted_row_bytes, self._down[0].converted_row_bytes)

    def forward(self, hidden_states: Tensor, chosen: Tensor, scores: Tensor) -> Tensor:
        """As transformers calls it: the states [T, H], and the experts and scores [T, k] of each
        token."""
        tokens, num_chosen = chosen.shape
        x = hidden_states.contiguous()
        memory = self.memory(tokens, num_chosen, numbers_width=0)
        memory.expert_of_pair.copy_(chosen)
        memory.score_of_pair.copy_(scores)
        return self._run(x, memory, [], other=None)

    def route(
        self, x: Tensor, numbers: Tensor, form: RouterForm, other: Tensor | None = None
    ) -> Tensor:
        """The same for x [T, H] and the numbers [T, E] of a router; plus ``other`` [T, H]."""
        memory = self.memory(len(x), form.chosen, numbers_width=0)
        # Kernels read whole vectors.
        filled = functional.pad(numbers, (0, -numbers.shape[1] % LANES)).contiguous()
        memory = replace(memory, numbers=filled)
        if other is not None:
            other = other.contiguous()
        return self._run(x.contiguous(), memory, [self.choose_step(memory, form)], other)

    def _run(
        self, x: Tensor, memory: ExpertMemory, before: list[RouteStep], other: Tensor | None
    ) -> Tensor:
        out = torch.empty_like(x)
        added = 0 if other is None else other.data_ptr()
        steps = self.steps(memory, x=x.data_ptr(), out=out.data_ptr(), other=added)
        for step in [*before, *steps]:
            step.arguments.count = len(x) * step.rows_per_token
            step.kernel.run(step.arguments, torch.get_num_threads())
        return out

    def memory(self, tokens: int, num_chosen: int, *, numbers_width: int) -> ExpertMemory:
        """Memory for so many tokens, each with so many experts."""
        dtype = self._gated[0].dtype
        pairs = tokens * num_chosen

        def indices(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=torch.int64)

        return ExpertMemory(
            numbers=torch.empty(tokens, numbers_width, dtype=dtype),
            expert_of_pair=indices(tokens, num_chosen),
            score_of_pair=torch.empty(tokens, num_chosen, dtype=torch.float32),
            row_of_pair=indices(pairs),
            token_of_row=indices(pairs),
            segments=indices(self.experts + 1),
            used=indices(self.experts + 1),
            rows=torch.empty(pairs, self.width, dtype=dtype),
            inside=torch.empty(pairs, self.inner_width, dtype=dtype),
            converted=torch.empty(pairs * self.converted_row_bytes, dtype=torch.uint8),
        )

    def choose_step(self, memory: ExpertMemory, router: RouterForm) -> RouteStep:
        """Chooses the experts of each token by the router's numbers."""
        call = self._route_call(memory)
        call.over_all = router.over_all
        return RouteStep(self._routes.choose, call, 1)

    def steps(self, memory: ExpertMemory, *, x: int, out: int, other: int) -> list[RouteStep]:
        """All that follows the choice. ``x``, ``out`` and ``other`` are addresses of [T, H]; if
        ``other`` is 0, nothing is added."""
        chosen = memory.expert_of_pair.shape[1]
        route = self._route_call(memory)
        route.x = x
        route.out = out
        route.other = other
        rows = memory.rows.data_ptr()
        inside = memory.inside.data_ptr()
        converted = memory.converted.data_ptr()
        return [
            RouteStep(self._routes.sort, _copy(route), 1),
            RouteStep(self._routes.gather, _copy(route), 1),
            *_group_steps(self._gated, memory, x=rows, out=inside, spare=converted, rows=chosen),
            *_group_steps(self._down, memory, x=inside, out=rows, spare=converted, rows=chosen),
            RouteStep(self._routes.combine, _copy(route), 1),
        ]

    def _route_call(self, memory: ExpertMemory) -> RouteCall:
        return RouteCall(
            chosen=memory.expert_of_pair.shape[1],
            experts=self.experts,
            numbers=memory.numbers.data_ptr(),
            numbers_stride=memory.numbers.stride(0) * memory.numbers.element_size(),
            expert_of_pair=memory.expert_of_pair.data_ptr(),
            score_of_pair=memory.score_of_pair.data_ptr(),
            row_of_pair=memory.row_of_pair.data_ptr(),
            token_of_row=memory.token_of_row.data_ptr(),
            segments=memory.segments.data_ptr(),
            used=memory.used.data_ptr(),
            rows=memory.rows.data_ptr(),
            width=self.width,
        )


def _copy(call: RouteCall) -> RouteCall:
    """Each kernel counts in arguments of its own."""
    return RouteCall.from_buffer_copy(call)


def _group_steps(
    linears: Sequence[ColumnLinear],
    memory: ExpertMemory,
    *,
    x: int,
    out: int,
    spare: int,
    rows: int,
) -> list[RouteStep]:
    """The products of all experts, and the conversion before them if they need one. ``rows`` are
    those of a token."""
    products = (ProductCall * len(linears))()
    steps = []
    for number, linear in enumerate(linears):
        *before, (_, product) = linear.calls(x, out=out, other=0, spare=spare)
        assert isinstance(product, ProductCall)
        products[number] = product
        if number == 0:
            steps += [RouteStep(kernel, arguments, rows) for kernel, arguments in before]
    first = products[0]
    group = GroupCall(
        products=ctypes.addressof(products),
        segments=memory.segments.data_ptr(),
        used=memory.used.data_ptr(),
        pairs=first.pairs,
        pairs_per_item=max(1, first.pairs // _ITEMS_PER_EXPERT),
        use_tiles=first.use_tiles,
    )
    steps.append(RouteStep(compiled_group(linears[0].tag), group, rows, owned=products))
    return steps
