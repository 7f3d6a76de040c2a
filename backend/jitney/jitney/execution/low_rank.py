"""LoRA adapters (Hu et al. 2021), as a step computes with them: ``y += (x A^T) B^T``.

The tokens of a step that are under adapters form spans, each of one adapter. The linear
layers add to each span the product of its adapter's factors. This module has the form in plain
torch; kernels have forms of their own.
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
    """A [rank, inputs]"""
    b: Tensor
    """B^T [rank, outputs], multiplied by the adapter's scale."""


class Part(NamedTuple):
    """One linear layer of the module as it was loaded, and where its result is found.

    Kernels may join several layers into one, whose result has the results of all of them side by
    side. The columns [first, last) of the joined result are this layer's.
    """

    path: str
    first: int
    last: int


Pack = Callable[[Mapping[str, Factors]], Any]
"""Takes an adapter's factors, by the layer's path, and returns the form in which kernels read
them."""
AddProducts = Callable[[Sequence[Part], Tensor, Tensor], None]
"""Called as ``add(parts, x, out)`` with the parts of a layer, its input x [T, inputs] and its
result out [T, outputs]. Adds the products of the step's adapters to ``out``, in place."""


@dataclass(frozen=True, eq=False)
class LowRank:
    """A loaded adapter: a ``batch.Adapter``."""

    version: str
    factors: Mapping[str, Factors]
    """By the layer's path in the module."""
    packed: Any = None
    """What a :data:`Pack` returned for the factors; None if kernels read no form of their own."""


class AdapterSpan(NamedTuple):
    """Tokens [first, last) of a step, all under one adapter."""

    first: int
    last: int
    adapter: LowRank


def spans_of(rows: Sequence[Row]) -> list[AdapterSpan]:
    """The spans of a step's flattened tokens, in order. Tokens without an adapter are in none."""
    spans: list[AdapterSpan] = []
    end = 0
    for row in rows:
        begin = end
        end = begin + len(row.token_ids)
        adapter = row.adapter
        if adapter is None:
            continue
        assert isinstance(adapter, LowRank)
        last_span = spans[-1] if spans else None
        if last_span is not None and last_span.last == begin and last_span.adapter is adapter:
            # Neighbouring rows of one adapter are one span: fewer products.
            spans[-1] = last_span._replace(last=end)
        else:
            spans.append(AdapterSpan(begin, end, adapter))
    return spans


def find_sites(module: nn.Module) -> dict[str, Site]:
    """The linear layers inside the decoder layers, by path. The output layer is not among them."""
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


def zero_factors(sites: Mapping[str, Site], rank: int) -> dict[str, Factors]:
    """The factors of an adapter of this rank that has all sites and adds zeros to each."""
    return {
        path: Factors(
            a=torch.zeros(rank, site.inputs),
            b=torch.zeros(rank, site.outputs),
        )
        for path, site in sites.items()
    }


def plain_products(spans: Sequence[AdapterSpan]) -> AddProducts:
    """An :data:`AddProducts` in plain torch, for a step with these spans."""

    def add(parts: Sequence[Part], x: Tensor, out: Tensor) -> None:
        for part in parts:
            for span in spans:
                factors = span.adapter.factors.get(part.path)
                if factors is None:
                    continue  # this adapter does not change this layer
                shrunk = x[span.first : span.last] @ factors.a.T
                out[span.first : span.last, part.first : part.last] += shrunk @ factors.b

    return add


class Hooks:
    """A context in which a module's linear layers add the products of a step's adapters."""

    def __init__(self, module: nn.Module, spans: Sequence[AdapterSpan]) -> None:
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
        """A forward hook for the layer of this path: what it returns replaces the layer's result,
        and like it is [1, T, outputs]."""

        def hook(layer: nn.Module, inputs: tuple[Tensor, ...], out: Tensor) -> Tensor:
            x = inputs[0]
            total = out.reshape(-1, out.shape[-1]).clone()
            whole = Part(path, first=0, last=total.shape[1])
            self._add([whole], x.reshape(-1, x.shape[-1]), total)
            return total.view(out.shape)

        return hook


def adapter_bytes(sites: Mapping[str, Site], rank: int, dtype: torch.dtype) -> int:
    """Bytes of an adapter of this rank that has all sites: A and B of each."""
    values = 0
    for site in sites.values():
        values += rank * (site.inputs + site.outputs)
    return values * dtype.itemsize
