"""LoRA adapters (Hu et al. 2021), as a step computes with them: ``y += (x A^T) B^T``.

The tokens of a step are spans, each of one adapter; whoever computes the step adds each span's own
product, of the adapter's own rank. Here that is plain torch; kernels have other forms.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from jitney.batch import Row
from jitney.execution.quantized import QuantizedLinear, is_linear, weight_of


class Site(NamedTuple):
    """A linear layer that adapters may change."""

    inputs: int
    outputs: int


class Factors(NamedTuple):
    """What an adapter adds to one linear layer."""

    a: Tensor
    """[rank, inputs]"""
    b: Tensor
    """B^T [rank, outputs], multiplied by the adapter's scale."""


class Part(NamedTuple):
    """A linear layer of the module as it was loaded. Kernels may join several layers into one that
    gives their results side by side: [first, last) are this one's among them."""

    path: str
    first: int
    last: int


Pack = Callable[[Mapping[str, Factors]], Any]
"""An adapter's factors, by path -> the form in which kernels read them."""
AddProducts = Callable[[Sequence[Part], Tensor, Tensor], None]
"""(parts of a layer, its x [T, inputs], out [T, outputs]): adds to ``out``, in place, what the
adapters of a step give."""


@dataclass(frozen=True, eq=False)
class LowRank:
    """A loaded adapter: a ``batch.Adapter``."""

    version: str
    factors: Mapping[str, Factors]
    """By the layer's path in the module."""
    packed: Any = None
    """The factors in the form that kernels read, if they have one: what a :data:`Pack` gave."""


class Span(NamedTuple):
    """Tokens [first, last) of a step, all of one adapter."""

    first: int
    last: int
    adapter: LowRank


def spans_of(rows: Sequence[Row]) -> list[Span]:
    """The spans of a step's flattened tokens, neighbours of one adapter as one; those of tokens
    without an adapter are left out."""
    spans: list[Span] = []
    end = 0
    for row in rows:
        begin = end
        end = begin + len(row.token_ids)
        adapter = row.adapter
        if adapter is None:
            continue
        assert isinstance(adapter, LowRank)
        before = spans[-1] if spans else None
        if before is not None and before.last == begin and before.adapter is adapter:
            spans[-1] = before._replace(last=end)
        else:
            spans.append(Span(begin, end, adapter))
    return spans


def find_sites(module: nn.Module) -> dict[str, Site]:
    """The linear layers inside the decoder's layers, by their paths; the output layer is none."""
    found = {}
    for path, child in module.named_modules():
        # Architectures call the list of decoder layers ``layers``, those like GPT-2 ``h``.
        if ".layers." not in f".{path}" and ".h." not in f".{path}":
            continue
        if isinstance(child, QuantizedLinear):
            found[path] = Site(child.in_features, child.out_features)
        elif is_linear(child):
            outputs, inputs = weight_of(child).shape
            found[path] = Site(inputs, outputs)
    return found


def idle_factors(sites: Mapping[str, Site], rank: int) -> dict[str, Factors]:
    """The factors of an adapter of this rank that changes every layer, and adds zeros."""
    return {
        path: Factors(torch.zeros(rank, site.inputs), torch.zeros(rank, site.outputs))
        for path, site in sites.items()
    }


def plain_products(spans: Sequence[Span]) -> AddProducts:
    """Adds the products of a step with these spans, one span after the other."""

    def add(parts: Sequence[Part], x: Tensor, out: Tensor) -> None:
        for path, begin, end in parts:
            for first, last, adapter in spans:
                factors = adapter.factors.get(path)
                if factors is not None:
                    out[first:last, begin:end] += (x[first:last] @ factors.a.T) @ factors.b

    return add


class Hooks:
    """A context in which the linear layers of a module add what the adapters of a step give."""

    def __init__(self, module: nn.Module, spans: Sequence[Span]) -> None:
        paths = {path for span in spans for path in span.adapter.factors}
        self._layers = [(path, module.get_submodule(path)) for path in sorted(paths)]
        self._add = plain_products(spans)
        self._handles: list[Any] = []

    def __enter__(self) -> None:
        for path, layer in self._layers:
            self._handles.append(layer.register_forward_hook(self._hook(path)))

    def __exit__(self, *raised: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _hook(self, path: str) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], Tensor]:
        def add(layer: nn.Module, given: tuple[Tensor, ...], out: Tensor) -> Tensor:
            total = out.reshape(-1, out.shape[-1]).clone()
            x = given[0].reshape(-1, given[0].shape[-1])
            self._add([Part(path, 0, total.shape[1])], x, total)
            return total.view(out.shape)

        return add


def adapter_bytes(sites: Mapping[str, Site], rank: int, dtype: torch.dtype) -> int:
    """The most that one adapter of this rank takes: A and B of every layer."""
    values = 0
    for site in sites.values():
        values += rank * site.inputs + rank * site.outputs
    return values * dtype.itemsize
