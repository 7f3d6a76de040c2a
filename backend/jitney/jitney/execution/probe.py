"""The proof, at load, that a module really runs through our attention and gives what it should.

Two parts, both on a dozen tokens. :func:`record_layers` runs the module with a recorder in place of
the attention and refuses whatever a paged cache would get wrong silently.
:func:`compare_with_eager` runs two interleaved, chunked sequences over a real paged cache and
compares their logits with those of transformers' own eager attention on each sequence alone: a
module that mixes neighbours, ignores positions or keeps state between calls cannot pass.
"""

import functools
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from jitney.batch import Row
from jitney.errors import CheckpointError, InstallationError
from jitney.execution.attention import build_metadata
from jitney.execution.interface import (
    NAME,
    AttentionCall,
    AttentionFunction,
    LayerSpec,
    PagedStep,
    StepFunction,
    forward,
)
from jitney.execution.memory import make_layer_caches
from jitney.execution.quantized import QuantizedLinear, exact_products
from jitney.execution.reference import ReferenceAttention
from jitney.execution.support import refuse
from jitney.sampling_params import SamplingParams

# Keyword arguments that modules pass along and that change nothing of one forward pass here.
_HARMLESS = frozenset({
    "dropout", "position_ids", "use_cache", "output_attentions", "output_hidden_states",
    "output_router_logits", "return_dict", "is_causal", "deterministic", "past_key_values",
    "cache_position", "position_embeddings",
})  # fmt: skip
_BLOCK_SIZE = 4
# Two sequences run side by side in two steps, their blocks out of order. By sequence:
_LENGTHS = (11, 7)
_TABLES = ([4, 1, 5], [2, 3])
# By step and sequence, (first token, count): the first sequence in two chunks, the second in one
# and a decode.
_STEPS = (((0, 5), (0, 6)), ((5, 6), (6, 1)))
# Most of the difference to eager attention, relative to the spread of the logits. In 16 bits, the
# rounding of a deep model or a router's flip is far above that of one operation.
_TOLERANCE = {torch.float32: 1e-2, torch.bfloat16: 0.35, torch.float16: 0.2}
# Where activations are rounded to 8 bits, a difference in a last bit tips some to the next value,
# up to 1/8 away, and more in each later layer: 0.11 after 32 layers in bfloat16. The proof against
# eager attention does without this rounding, and looks at the products apart.
_E4M3_TOLERANCE = 0.35
# Relative to the norm of a product's result: that of inputs rounded to 3 bits of fraction is 0.027.
_E4M3_PRODUCT = 0.06


def record_layers(module: PreTrainedModel, windows: list[int | None]) -> list[LayerSpec]:
    """Run ``module`` once with a recorder and return the layers' specifications, by layer index.

    ``windows`` are the configuration's (``support.layer_windows``). Raises UnsupportedModelError.
    """
    recorder = _Recorder(module.config.model_type, windows)
    ids = _probe_ids(module)[0]
    positions = torch.arange(len(ids), device=ids.device)
    logits = forward(module, ids, positions, positions[-1:], recorder)
    if logits.shape[0] != 1:
        raise refuse(recorder.model_type, "it does not compute the logits of chosen tokens alone")
    return recorder.specs()


def compare_with_eager(
    module: PreTrainedModel, specs: list[LayerSpec], weights: str = "the weight file"
) -> None:
    """Check the module over a paged cache against eager attention; see the module's docstring.

    Raises UnsupportedModelError if they differ, CheckpointError, naming the file ``weights``, if
    eager attention's own logits are not finite.
    """
    sequences = _probe_ids(module)
    with exact_products(module) as layers, torch.inference_mode():
        paged = probe_logits(module, specs)
        try:
            module.set_attn_implementation("eager")
            eager = [
                module(input_ids=ids.unsqueeze(0), use_cache=False).logits[0] for ids in sequences
            ]
        finally:
            module.set_attn_implementation(NAME)
    expected = torch.cat(eager).float()
    if not torch.isfinite(expected).all():
        raise CheckpointError(
            f"{weights} gives logits that are not finite: values in it are corrupt, or too large "
            "for the dtype"
        )
    error = _distance(paged, expected)
    if not error <= _TOLERANCE[paged.dtype]:  # NaN is no agreement
        raise refuse(
            module.config.model_type,
            f"over a paged cache its logits are {error:.2g} of their spread away from those of "
            "transformers' own attention",
        )
    _check_products(layers)


def check_same(before: Tensor, after: Tensor, *, coarse: bool = False) -> None:
    """Check that a module gives what it gave before it was rearranged for speed. ``before`` and
    ``after`` are its :func:`probe_logits`. ``coarse``: some of its layers round their inputs to 8
    bits. Raises InstallationError, because a kernel went wrong on this machine."""
    tolerance = _TOLERANCE[after.dtype]
    if coarse:
        tolerance = max(tolerance, _E4M3_TOLERANCE)
    error = _distance(after, before)
    if not error <= tolerance:  # NaN is no agreement
        raise InstallationError(
            f"the fast kernels of this machine give logits {error:.2g} of their spread away from "
            "torch's own: set the options attention to 'reference', prepack and fuse to false"
        )


def _check_products(layers: list[QuantizedLinear]) -> None:
    """Run one layer of each shape on rows of random numbers, with rounded inputs and without.
    Raises InstallationError if a product is wrong on this machine, as torch's of e4m3 may be."""
    generator = torch.Generator().manual_seed(0)
    of_each_shape = {(each.out_features, each.in_features): each for each in layers}
    for layer in of_each_shape.values():
        x = torch.randn(sum(_LENGTHS), layer.in_features, generator=generator)
        x = x.to(device=layer.weight.device, dtype=layer.dtype)
        with torch.inference_mode():
            got = layer(x).float()
            with exact_products(layer):
                right = layer(x).float()
        error = float((got - right).norm() / right.norm())
        if not error <= _E4M3_PRODUCT:  # NaN is no agreement
            raise InstallationError(
                f"a product of 8 bits gives results {error:.2g} away from the right "
                "ones on this machine: set the option quantization to 'none'"
            )


def _distance(got: Tensor, expected: Tensor) -> float:
    """How far these logits [T, vocabulary] are apart: for each token the norm of the difference,
    relative to the norm of the expected logits less their mean; of all tokens the median."""
    right = expected.float()
    spread = (right - right.mean(-1, keepdim=True)).norm(dim=-1)
    return ((got.float() - right).norm(dim=-1) / spread).median().item()


def embedding_weight(module: PreTrainedModel) -> Tensor:
    """The token embedding [vocabulary, hidden size]; its dtype and device are the module's."""
    weight = module.get_input_embeddings().weight
    assert isinstance(weight, Tensor)
    return weight


class _Recorder:
    """Notes each layer's call, refuses what cannot be served, and answers zeros."""

    def __init__(self, model_type: str, windows: list[int | None]) -> None:
        self.model_type = model_type
        self._windows = windows
        self._specs: dict[int, LayerSpec] = {}

    def __call__(self, call: AttentionCall) -> Tensor:
        for problem in self._problems(call):
            raise refuse(self.model_type, problem)
        self._specs[call.layer] = LayerSpec(
            call.query.shape[1], call.key.shape[1], call.key.shape[2], call.window
        )
        return torch.zeros_like(call.query)

    def _problems(self, call: AttentionCall) -> Iterator[str]:
        """What a paged cache would get wrong in this call. Only the first is ever asked for, so a
        check may rely on those before it."""
        layer = call.layer
        if layer in self._specs:
            yield f"layer {layer} attends twice in one pass"
        if not 0 <= layer < len(self._windows):
            yield f"it attends in layer {layer}, outside its own count"
        if call.mask is not None:
            yield f"layer {layer} brings a mask of its own"
        if call.extra.get("is_causal") is False:
            yield f"the attention of layer {layer} is not causal"
        stated = self._windows[layer]
        if call.window != stated:
            yield (
                f"layer {layer} attends with a window of {call.window}, but its configuration "
                f"states {stated}"
            )
        unknown = []
        for name, value in sorted(call.extra.items()):
            is_asked_for = value is not None and value is not False
            if is_asked_for and name not in _HARMLESS:
                unknown.append(name)
        if unknown:
            yield f"layer {layer} asks attention for {', '.join(unknown)}"
        if call.key.shape != call.value.shape or call.query.shape[-1] != call.key.shape[-1]:
            yield "its keys and values have different head sizes"

    def specs(self) -> list[LayerSpec]:
        """By layer index. Raises UnsupportedModelError if a layer never called."""
        layers = range(len(self._windows))
        for layer in layers:
            if layer not in self._specs:
                reason = f"layer {layer} does not attend through our interface"
                raise refuse(self.model_type, reason)
        return [self._specs[layer] for layer in layers]


@torch.inference_mode()
def probe_logits(
    module: PreTrainedModel,
    specs: list[LayerSpec],
    attention: Sequence[AttentionFunction] | None = None,
    block_size: int = _BLOCK_SIZE,
    step: StepFunction | None = None,
) -> Tensor:
    """Logits [sum of _LENGTHS, vocabulary] of both probe sequences over a paged cache.

    By default the layers attend in plain torch, and the module runs through transformers. Kernels
    may depend on ``block_size``, so it should be that of the service; at least _BLOCK_SIZE is used,
    for which the probe's tables are long enough.
    """
    block_size = max(block_size, _BLOCK_SIZE)
    sequences = _probe_ids(module)
    device = sequences[0].device
    dtype = embedding_weight(module).dtype
    attention = attention or [ReferenceAttention()] * len(specs)
    num_blocks = max(map(max, _TABLES)) + 1
    caches = make_layer_caches(specs, attention, block_size, dtype, device, num_blocks)
    step = step or functools.partial(forward, module)
    logits_of: list[list[Tensor]] = [[] for _ in sequences]
    for chunks in _STEPS:
        rows = [
            probe_row(sequences[i].tolist(), start, count, _TABLES[i])
            for i, (start, count) in enumerate(chunks)
        ]
        meta = build_metadata(rows, block_size, device)
        ids = torch.tensor([t for row in rows for t in row.token_ids], device=device)
        every_token = torch.arange(len(ids), device=device)
        logits = step(ids, meta.positions, every_token, PagedStep(caches, meta))
        of_chunks = logits.split([count for _, count in chunks])
        for i, of_chunk in enumerate(of_chunks):
            logits_of[i].append(of_chunk)
    return torch.cat([torch.cat(of_sequence) for of_sequence in logits_of])


def _probe_ids(module: PreTrainedModel) -> list[Tensor]:
    """Two fixed sequences of _LENGTHS, spread over the vocabulary; int64 on the module's device."""
    weight = embedding_weight(module)
    size = len(weight)
    ids = torch.arange(sum(_LENGTHS), device=weight.device) * 7919 + size // 3
    return list((ids % size).split(list(_LENGTHS)))


def probe_row(
    prompt: list[int],
    start: int,
    count: int,
    block_table: list[int],
    params: SamplingParams | None = None,
) -> Row:
    """A row that computes ``count`` tokens of a prompt, and samples if there are ``params``."""
    return Row(
        key=0,
        index=0,
        token_ids=prompt[start : start + count],
        start=start,
        block_table=block_table,
        sample=(0,) if params else (),
        params=params or SamplingParams(),
        prompt=prompt,
        output=[],
        stop_ids=frozenset(),
        bad_words_ids=[],
    )
