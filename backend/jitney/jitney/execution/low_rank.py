"""LoRA adapters (Hu et al. 2021), as a step computes with them: ``y += (x A^T) B^T``.

The tokens of a step that are under adapters form spans, each of one adapter. The linear
layers add to each span the product of its adapter's factors. This module has the form in plain
torch (:func:`plain_products`); kernels have forms of their own.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
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


BeginProducts = Callable[[Sequence[AdapterSpan]], AddProducts]
"""Called once in a step, with the step's spans, of which there is at least one."""


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


def find_sites(module: nn.Module, without: Sequence[str] = ()) -> dict[str, Site]:
    """The linear layers inside the decoder layers, by path. The output layer is not among them, nor
    are those of the modules ``without``."""
    found = {}
    for path, child in module.named_modules():
        # Architectures call the list of decoder layers ``layers``, those like GPT-2 ``h``.
        if ".layers." not in f".{path}" and ".h." not in f".{path}":
            continue
        if any(path.startswith(f"{each}.") for each in without):
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
    """A :data:`BeginProducts` in plain torch: one product for each span and layer."""

    def add(parts: Sequence[Part], x: Tensor, out: Tensor) -> None:
        for part in parts:
            for span in spans:
                factors = span.adapter.factors.get(part.path)
                if factors is None:
                    continue  # this adapter does not change this layer
                shrunk = x[span.first : span.last] @ factors.a.T
                out[span.first : span.last, part.first : part.last] += shrunk @ factors.b

    return add


def hook_layers(
    module: nn.Module,
    spans: Sequence[AdapterSpan],
    begin_products: BeginProducts = plain_products,
) -> AbstractContextManager[None]:
    """A context in which a module's linear layers add the products of a step's adapters. ``spans``
    may be empty: then nothing is added."""
    if not spans:
        return nullcontext()
    paths = changed_paths(spans)
    return Hooks(
        {path: module.get_submodule(path) for path in sorted(paths)}, begin_products(spans)
    )


def changed_paths(spans: Sequence[AdapterSpan]) -> set[str]:
    """The linear layers that any adapter of the step changes."""
    return {path for span in spans for path in span.adapter.factors}


class Hooks:
    """A context in which linear layers add the products of a step's adapters."""

    def __init__(self, layers: Mapping[str, nn.Module], add: AddProducts) -> None:
        """``layers``: by path."""
        self._layers = layers
        self._add = add
        self._handles: list[Any] = []

    def __enter__(self) -> None:
        for path, layer in self._layers.items():
            self._handles.append(layer.register_forward_hook(_adding_hook(path, self._add)))

    def __exit__(self, *raised: object) -> None:
        for handle in self._handles:
            handle.remove()


def _adding_hook(
    path: str, add: AddProducts
) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], Tensor]:
    """A forward hook for the layer of this path. It returns what replaces the layer's result: that
    result [1, T, outputs] with the products added."""

    def hook(layer: nn.Module, inputs: tuple[Tensor, ...], out: Tensor) -> Tensor:
        x = inputs[0]
        total = out.reshape(-1, out.shape[-1]).clone()
        whole = Part(path, first=0, last=total.shape[1])
        add([whole], x.reshape(-1, x.shape[-1]), total)
        return total.view(out.shape)

    return hook


def adapter_bytes(sites: Mapping[str, Site], rank: int, dtype: torch.dtype) -> int:
    """Bytes of an adapter of this rank that has all sites: A and B of each."""
    values = 0
    for site in sites.values():
        values += rank * (site.inputs + site.outputs)
    return values * dtype.itemsize
