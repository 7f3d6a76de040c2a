"""The proof, at load, that a module really runs through our attention and gives what it should.

Two parts, both on a few dozen tokens (``probe_tokens``). :func:`record_layers` runs the module with
a recorder instead of attention and refuses whatever a paged cache would get wrong silently.
:func:`compare_with_eager` runs interleaved, chunked sequences over a real paged cache and compares
their logits with those of transformers' own eager attention on each sequence alone.

Logits are compared by their :func:`_distance`: the median over the tokens of each step, and over
those of each sequence at late positions; the largest of these.

- The module is refused if in a step more than half of the tokens have logits beyond the tolerance,
  or if any logit is a NaN. So a module is refused that takes a token's index in the step for its
  position: in the second step, no token is at the right distance from the keys of the first step,
  and all logits are wrong.
- It passes if in each step at most half of the tokens have wrong logits. So a module passes that
  computes only the decode wrongly.
- A module may mix each token with its neighbours in the step, as a short convolution or a token
  shift does. Then only tokens at the edges of chunks have a wrong neighbour. Such a module is
  refused only if attention carries the error to more than half of a step's tokens.
"""

import functools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from jitney.batch import Row
from jitney.errors import CheckpointError, InstallationError
from jitney.execution.alibi import ALIBI_ELEMENTS
from jitney.execution.attention import build_metadata
from jitney.execution.carry import step_cache_for
from jitney.execution.interface import (
    NAME,
    UNPAGED,
    AttentionCall,
    AttentionFunction,
    LayerSpec,
    PagedStep,
    StepFunction,
    forward_module,
    set_attention,
)
from jitney.execution.layer_attention import torch_attention
from jitney.execution.memory import make_layer_caches
from jitney.execution.probe_tokens import BLOCK_SIZE, ProbeTokens
from jitney.execution.quantized import QuantizedLinear, float_inputs, layers_that_round_inputs
from jitney.execution.state_slots import StateLayout, StateSlots
from jitney.execution.state_trial import RecordedStates, record_states
from jitney.execution.support import layer_chunks, unservable
from jitney.sampling_params import SamplingParams

_HARMLESS = frozenset({
    "dropout", "position_ids", "use_cache", "output_attentions", "output_hidden_states",
    "output_router_logits", "return_dict", "is_causal", "deterministic", "past_key_values",
    "cache_position", "position_embeddings",
})  # fmt: skip
"""Keyword arguments that layers give to attention and that do not change its result here."""


TOLERANCE = {torch.float32: 1e-2, torch.bfloat16: 0.35, torch.float16: 0.2}
"""The largest distance that is allowed. In 16 bits, one rounding in a deep model, or one token that
a router sends to another expert, changes logits far more than one operation does."""
_ROUNDED_INPUTS_TOLERANCE = 0.35
"""The same where layers round their inputs to 8 bits. A difference in the last bit of an input may
then round it to another value, in e4m3 up to 1/8 away, and each layer adds to it: in bfloat16 the
distance is 0.11 after 32 layers. In :func:`compare_with_eager` no layer rounds its inputs."""
_PRODUCT_TOLERANCE = 0.06
"""The largest difference, relative to the norm of the right product, between a product with rounded
inputs and one without. With inputs of 3 bits of fraction (e4m3) it is 0.027."""
_PRODUCT_ROWS = 18


def record_layers(module: PreTrainedModel, windows: list[int | None]) -> list[LayerSpec]:
    """Run ``module`` once with a recorder and return the layers' specifications, by layer index.

    ``windows`` are the configuration's (``support.layer_windows``). Raises UnsupportedModelError
    for what a paged cache would get wrong.
    """
    recorder = _Recorder(module.config, windows)
    ids = probe_ids(module, ProbeTokens())[0]
    positions = torch.arange(len(ids), device=ids.device)
    last = positions[-1:]
    logits = forward_module(module, ids, positions, last, recorder)
    if logits.shape[0] != 1:
        raise unservable(
            recorder.model_type, "it does not compute the logits of chosen tokens alone"
        )
    return recorder.specs()


def record_stateful_layers(
    module: PreTrainedModel, windows: list[int | None]
) -> tuple[list[LayerSpec], RecordedStates]:
    """As :func:`record_layers`, for a model with state layers: also what states it keeps. Layers
    that do not attend are ``interface.UNPAGED``."""
    recorder = _Recorder(module.config, windows)
    ids = probe_ids(module, ProbeTokens())[0]
    recorded = record_states(module, ids, recorder)
    return recorder.found(), recorded


def compare_with_eager(
    module: PreTrainedModel,
    specs: list[LayerSpec],
    weights: str = "the weight file",
    tokens: ProbeTokens | None = None,
    states: StateLayout | None = None,
) -> None:
    """Check the module over a paged cache against eager attention; see the module's docstring.

    ``tokens`` by default are those at early positions alone. Raises UnsupportedModelError if the
    :func:`_distance` of their logits is too large. Raises CheckpointError, naming the file
    ``weights``, if eager attention's own logits are not finite.
    """
    tokens = tokens or ProbeTokens()
    with float_inputs(module), torch.inference_mode():
        paged = probe_logits(module, specs, tokens=tokens, states=states)
        expected = _eager_logits(module, tokens)
    if not torch.isfinite(expected).all():
        raise CheckpointError(
            f"{weights} gives logits that are not finite: values in it are corrupt, or too large "
            "for the dtype"
        )
    error = _distance(paged, expected, tokens)
    if not error.size <= TOLERANCE[paged.dtype]:  # also if it is NaN
        raise unservable(
            module.config.model_type,
            f"over a paged cache its logits{error.where} are {error.size:.2g} of their spread away "
            "from those of transformers' own attention",
        )
    _check_products(layers_that_round_inputs(module))


def _eager_logits(module: PreTrainedModel, tokens: ProbeTokens) -> Tensor:
    """Logits [tokens, vocabulary] of the sequences, each alone, by transformers' own eager
    attention: float32."""
    logits = []
    set_attention(module, "eager")
    try:
        for sequence, ids in zip(tokens.sequences, probe_ids(module, tokens), strict=True):
            # At early positions the module is not told: it must count as we do.
            stated: dict[str, Any] = {}
            if sequence.first_position > 0:
                positions = sequence.positions(ids.device).unsqueeze(0)
                stated["position_ids"] = positions
                cache = step_cache_for(module, positions)
                if cache is not None:
                    stated["past_key_values"] = cache
            output = module(input_ids=ids.unsqueeze(0), use_cache=False, **stated)
            logits.append(output.logits[0])
    finally:
        set_attention(module, NAME)
    return torch.cat(logits).float()


def runs_alone(module: PreTrainedModel) -> bool:
    """Whether transformers can run the module by itself, with its own attention."""
    try:
        with torch.inference_mode():
            _eager_logits(module, ProbeTokens())
    except RuntimeError:
        return False
    return True


def check_same(
    before: Tensor,
    after: Tensor,
    *,
    rounds_inputs: bool = False,
    tokens: ProbeTokens | None = None,
) -> None:
    """Check that a module gives what it gave before it was rearranged for speed. ``before`` and
    ``after`` are its :func:`probe_logits`, of the same ``tokens``. ``rounds_inputs``: some of its
    layers round their inputs to 8 bits. Raises InstallationError if their :func:`_distance` is too
    large, because a kernel went wrong on this machine."""
    tolerance = TOLERANCE[after.dtype]
    if rounds_inputs:
        tolerance = max(tolerance, _ROUNDED_INPUTS_TOLERANCE)
    error = _distance(after, before, tokens or ProbeTokens())
    if not error.size <= tolerance:  # also if it is NaN
        raise InstallationError(
            f"the fast kernels of this machine give logits{error.where} {error.size:.2g} of their "
            "spread away from torch's own: set the options attention to 'reference', prepack and "
            "fuse to false"
        )


def _check_products(layers: list[QuantizedLinear]) -> None:
    """For each kernel, take one layer, and multiply random rows by it, with rounded inputs and
    without. Raises InstallationError if a product is wrong on this machine, as torch's product of
    e4m3 may be."""
    layer_of_kernel = {_kernel_key(each): each for each in layers}
    generator = torch.Generator().manual_seed(0)
    for layer in layer_of_kernel.values():
        x = torch.randn(_PRODUCT_ROWS, layer.in_features, generator=generator)
        x = x.to(device=layer.weight.device, dtype=layer.dtype)
        with torch.inference_mode():
            got = layer(x).float()
            with float_inputs(layer):
                right = layer(x).float()
        error = float((got - right).norm() / right.norm())
        if not error <= _PRODUCT_TOLERANCE:  # also if it is NaN
            raise InstallationError(
                f"a product of 8 bits gives results {error:.2g} away from the right "
                "ones on this machine: set the option quantization to 'none'"
            )


class _KernelKey(NamedTuple):
    """Layers that agree in these are multiplied by the same kernel."""

    layer_class: type[QuantizedLinear]
    inputs: int
    outputs: int
    scales: torch.Size
    """The shape of the scales. In 4 bits it says how many groups there are."""


def _kernel_key(layer: QuantizedLinear) -> _KernelKey:
    return _KernelKey(type(layer), layer.in_features, layer.out_features, layer.scale.shape)


class _Distance(NamedTuple):
    size: float
    """NaN if any logit is."""
    where: str
    """Of the tokens that are farthest apart: see ``TokenGroup``."""


def _distance(got: Tensor, expected: Tensor, tokens: ProbeTokens) -> _Distance:
    """How far these logits [tokens, vocabulary] are apart, relative to the spread of those
    expected. Each group of tokens has a distance, the median over its tokens; the largest is
    returned. It is a median because a router may send a token to another expert after a rounding.

    """
    distances = token_distances(got, expected)
    groups = tokens.groups(distances.device)
    medians = torch.stack([distances[group.members].median() for group in groups])
    worst = int(medians.argmax())  # a NaN, if there is one
    return _Distance(medians[worst].item(), groups[worst].where)


def token_distances(got: Tensor, expected: Tensor) -> Tensor:
    """How far these logits [tokens, vocabulary] are apart, relative to the spread of those
    expected: float32 [tokens].

    A token's spread is the norm of its logits less their mean. If the mean were left in, a large
    number common to all logits would make any difference look small. No mean is taken off the
    difference itself: both computations must agree in that common number too.
    """
    right = expected.float()
    difference = (got.float() - right).norm(dim=-1)
    spread = (right - right.mean(-1, keepdim=True)).norm(dim=-1)
    return difference / spread


def embedding_weight(module: PreTrainedModel) -> Tensor:
    """The token embedding [vocabulary, hidden size]; its dtype and device are the module's."""
    weight = module.get_input_embeddings().weight
    assert isinstance(weight, Tensor)
    return weight


class _Recorder:
    """A ``PagedFunction`` that notes each layer's calls and returns zeros. Raises
    UnsupportedModelError for a call that cannot be served."""

    def __init__(self, config: PreTrainedConfig, windows: list[int | None]) -> None:
        self.model_type = config.model_type
        self._windows = windows
        self._context: int | None = getattr(config, "max_position_embeddings", None)
        self._chunks = layer_chunks(config)
        self._specs: dict[int, list[LayerSpec]] = {}
        """By layer, in the order of its calls."""

    def __call__(self, call: AttentionCall) -> Tensor:
        problem = next(self._problems(call), None)
        if problem is not None:
            raise unservable(self.model_type, problem)
        has_latents = call.latents is not None
        head_size = call.key.shape[2]
        if call.slopes is not None:
            head_size += ALIBI_ELEMENTS
        spec = LayerSpec(
            num_heads=call.query.shape[1],
            num_kv_heads=call.key.shape[1],
            head_size=head_size,
            window=call.window,
            value_size=call.index_key_size if has_latents else None,
            chunk=self._chunks[call.layer],
            has_slopes=call.slopes is not None,
            has_latents=has_latents,
        )
        self._specs.setdefault(call.layer, []).append(spec)
        return call.query.new_zeros((*call.query.shape[:2], call.value_size))

    def _hides_nothing(self, window: int | None, stated: int | None) -> bool:
        """Whether attention without a window is that of the stated one, which is as long as the
        context: so in Phi-3.5-MoE."""
        if window is not None or stated is None or self._context is None:
            return False
        return stated >= self._context

    def _problems(self, call: AttentionCall) -> Iterator[str]:
        """What a paged cache would get wrong in this call. The caller stops at the first problem,
        so a check may rely on those before it."""
        layer = call.layer
        if not 0 <= layer < len(self._windows):
            yield f"it attends in layer {layer}, outside its own count"
        if call.mask is not None:
            yield f"layer {layer} brings a mask of its own"
        if call.extra.get("is_causal") is False:
            yield f"the attention of layer {layer} is not causal"
        stated = self._windows[layer]
        if call.window != stated and not self._hides_nothing(call.window, stated):
            yield (
                f"layer {layer} attends with a window of {call.window}, but its configuration "
                f"states {stated}"
            )
        chunk = self._chunks[layer]
        if chunk is not None and chunk % BLOCK_SIZE != 0:
            yield f"layer {layer} attends in chunks of {chunk} tokens, which are no whole blocks"
        unknown = []
        for name, value in sorted(call.extra.items()):
            is_asked_for = value is not None and value is not False
            if is_asked_for and name not in _HARMLESS:
                unknown.append(name)
        if unknown:
            yield f"layer {layer} asks attention for {', '.join(unknown)}"
        if call.latents is not None:
            return
        if call.key.shape != call.value.shape or call.query.shape[-1] != call.key.shape[-1]:
            yield "its keys and values have different head sizes"

    def found(self) -> list[LayerSpec]:
        """By layer index; ``interface.UNPAGED`` if a layer never called. Raises
        UnsupportedModelError if one called twice."""
        specs = [UNPAGED] * len(self._windows)
        for layer, calls in self._specs.items():
            if len(calls) > 1:
                raise unservable(self.model_type, f"layer {layer} attends twice in one pass")
            specs[layer] = calls[0]
        return specs

    def specs(self) -> list[LayerSpec]:
        """By layer index; then those of the second calls and further ones. Raises
        UnsupportedModelError if a layer never called."""
        found: list[LayerSpec] = []
        layers = range(self._num_layers())
        for layer in layers:
            if layer not in self._specs:
                reason = f"layer {layer} does not attend through our interface"
                raise unservable(self.model_type, reason)
            found.append(self._specs[layer][0])
        for layer in layers:
            last = layer
            for spec in self._specs[layer][1:]:
                found[last] = replace(found[last], again=len(found))
                last = len(found)
                found.append(spec)
        return found

    def _num_layers(self) -> int:
        """How many layers there are. A model whose layers attend again may count each time as a
        layer (HRM)."""
        calls = sum(len(specs) for specs in self._specs.values())
        if calls == len(self._windows):
            return len(self._specs)
        return len(self._windows)


@torch.inference_mode()
def probe_logits(
    module: PreTrainedModel,
    specs: list[LayerSpec],
    attention: Sequence[AttentionFunction] | None = None,
    block_size: int = BLOCK_SIZE,
    step: StepFunction | None = None,
    tokens: ProbeTokens | None = None,
    states: StateLayout | None = None,
) -> Tensor:
    """Logits [tokens, vocabulary] of all sequences over a paged cache.

    ``attention`` has each layer's function, by default the reference; ``step`` runs the module, by
    default through transformers. ``tokens`` by default are those at early positions alone. Kernels
    may depend on ``block_size``, so it should be that of the service. A smaller ``block_size`` than
    BLOCK_SIZE is raised to that: the block tables of the sequences are long enough for BLOCK_SIZE,
    and not for less.
    """
    if attention is None:
        attention = [torch_attention(spec) for spec in specs]
    if step is None:
        step = functools.partial(forward_module, module)
    tokens = tokens or ProbeTokens()
    block_size = max(block_size, BLOCK_SIZE)
    all_ids = probe_ids(module, tokens)
    device = all_ids[0].device
    caches = make_layer_caches(
        layers=specs,
        attention=attention,
        block_size=block_size,
        dtype=embedding_weight(module).dtype,
        device=device,
        num_blocks=tokens.num_blocks,
    )
    slots = None
    if states is not None:
        slots = StateSlots(states, num_slots=len(tokens.sequences), device=device)

    logits_of: list[list[Tensor]] = [[] for _ in tokens.sequences]
    for step_number in range(tokens.num_steps):
        chunks = [sequence.chunks[step_number] for sequence in tokens.sequences]
        rows = []
        positions = []
        for number, (sequence, ids, chunk) in enumerate(
            zip(tokens.sequences, all_ids, chunks, strict=True)
        ):
            row = probe_row(
                prompt=ids.tolist(),
                start=chunk.start,
                count=chunk.num_tokens,
                block_table=sequence.block_table,
            )
            if slots is not None:
                row.slot = number
            rows.append(row)
            first = sequence.first_position + chunk.start
            positions.append(torch.arange(first, first + chunk.num_tokens, device=device))
        # Of a late sequence the metadata know the context that it has: a few tokens.
        meta = replace(build_metadata(rows, block_size, device), positions=torch.cat(positions))
        step_ids = torch.tensor([token for row in rows for token in row.token_ids], device=device)
        all_tokens = torch.arange(len(step_ids), device=device)
        logits = step(step_ids, meta.positions, all_tokens, PagedStep(caches, meta, slots))
        parts = logits.split([chunk.num_tokens for chunk in chunks])
        for of_sequence, part in zip(logits_of, parts, strict=True):
            of_sequence.append(part)
    return torch.cat([torch.cat(of_sequence) for of_sequence in logits_of])


def probe_ids(module: PreTrainedModel, tokens: ProbeTokens) -> list[Tensor]:
    """The token ids of the sequences: fixed, spread over the vocabulary; int64 on the module's
    device."""
    weight = embedding_weight(module)
    size = len(weight)
    ids = torch.arange(tokens.num_tokens, device=weight.device) * 7919 + size // 3
    return list((ids % size).split([sequence.length for sequence in tokens.sequences]))


def probe_row(
    prompt: list[int],
    start: int,
    count: int,
    block_table: list[int],
    params: SamplingParams | None = None,
) -> Row:
    """A row that computes ``count`` tokens of a prompt. It samples the next one, with these
    ``params``, if they are given."""
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
