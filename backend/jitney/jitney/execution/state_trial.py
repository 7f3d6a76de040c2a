"""Finds out, at load, what states a model keeps and which of its modules keep them.

The model runs once on a few tokens, with a cache of transformers that notes who reads and writes
it. Then one module of each class is tried by itself: whether it goes on after a state by several
tokens at once, or by one at a time only. Called by ``read_model`` and by ``weigh``.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache

from jitney.execution.attention import RowSlot
from jitney.execution.interface import AttentionCall, PagedFunction
from jitney.execution.state_rows import RowForward, RowGroup, SlotCache
from jitney.execution.state_slots import (
    StateKey,
    StateKind,
    StateLayout,
    StateModule,
    StateShape,
    StateSlots,
)
from jitney.execution.support import cache_argument, unservable

_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 3e-2}
"""The largest difference, relative to the mean norm of a token's result, between a module that goes
on after a state and one that computes all tokens at once."""
_CHUNKS = ((0, 5), (5, 10), (10, 11))
"""The tokens, first and last but one, of the steps in which a module is tried."""


@dataclass(frozen=True)
class RecordedStates:
    """What :func:`record_states` has found out."""

    layout: StateLayout
    calls: Mapping[str, "_Call"]
    """By the path of a module with states: how it was called."""


class _Call(NamedTuple):
    """The arguments of a module that runs."""

    path: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class _Recording(DynamicCache):
    """A cache that notes which module uses which state, and which layer attends."""

    def __init__(self, module: PreTrainedModel) -> None:
        super().__init__(config=module.config)
        self.running: list[_Call] = []
        """The innermost module is the last."""
        self.users: dict[StateKey, _Call] = {}
        self.attending: int | None = None
        """The layer whose attention is about to be called; None before it has said so."""
        self.shares_attention = False

    def attend(self, call: AttentionCall, recorder: PagedFunction) -> Tensor:
        """Hand a call of attention to ``recorder``, under the layer that it is for."""
        if self.attending is not None and self.attending != call.layer:
            self.shares_attention = True
            call = call._replace(layer=self.attending)
        self.attending = None
        return recorder(call)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        self.attending = layer_idx
        return key_states, value_states

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        self._note(layer_idx, "conv", state_idx)
        return super().get_conv_state(layer_idx, state_idx)

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        self._note(layer_idx, "recurrent", state_idx)
        return super().get_recurrent_state(layer_idx, state_idx)

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> Tensor:
        self._note(layer_idx, "conv", state_idx)
        return super().update_conv_state(conv_states, layer_idx, state_idx, **kwargs)

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> Tensor:
        self._note(layer_idx, "recurrent", state_idx)
        return super().update_recurrent_state(recurrent_states, layer_idx, state_idx, **kwargs)

    # MiniMax has methods of its own for its one state.

    def get_linear_cache(self, layer_idx: int) -> Tensor | None:
        self._note(layer_idx, "recurrent", 0)
        return None

    def set_linear_cache(self, layer_idx: int, linear_cache: Tensor) -> None:
        self.update_recurrent_state(linear_cache, layer_idx)

    def _note(self, layer: int, kind: StateKind, number: int) -> None:
        self.users[StateKey(layer, kind, number)] = self.running[-1]

    def shapes(self) -> dict[StateKey, StateShape]:
        """Of the states that were written."""
        found = {}
        for key in self.users:
            layer: Any = self.layers[key.layer]
            states = layer.conv_states if key.kind == "conv" else layer.recurrent_states
            state = states[key.number]
            if state is not None:
                found[key] = StateShape(tuple(state.shape[1:]), state.dtype)
        return found


@torch.inference_mode()
def record_states(module: PreTrainedModel, ids: Tensor, recorder: PagedFunction) -> RecordedStates:
    """Run ``module`` once on a prompt ``ids`` [T]. ``recorder`` gets its calls of attention.

    Raises UnsupportedModelError for states that cannot be kept in slots, and whatever the module
    raises.
    """
    model_type = module.config.model_type
    argument = cache_argument(module)
    if argument is None:
        raise unservable(model_type, "it takes no cache of transformers for its states")
    cache = _Recording(module)
    handles = [_note_calls(path, child, cache.running) for path, child in module.named_modules()]
    positions = torch.arange(len(ids), device=ids.device)
    try:
        output = module(
            input_ids=ids.unsqueeze(0),
            position_ids=positions.unsqueeze(0),
            use_cache=False,
            logits_to_keep=positions[-1:],
            paged=partial(cache.attend, recorder=recorder),
            **{argument: cache},
        )
    finally:
        for remove in handles:
            remove()

    if output.logits.shape[1] != 1:
        raise unservable(model_type, "it does not compute the logits of chosen tokens alone")
    shapes = cache.shapes()
    calls: dict[str, _Call] = {}
    keys_of: dict[str, list[StateKey]] = {}
    for key in shapes:
        call = cache.users[key]
        calls[call.path] = call
        keys_of.setdefault(call.path, []).append(key)
    if not shapes:
        raise unservable(model_type, "its states are not in a cache of transformers")
    modules = []
    for path, keys in keys_of.items():
        if len({key.layer for key in keys}) > 1:
            raise unservable(model_type, f"{path} has states of several layers")
        modules.append(StateModule(path, keys, by_token=False))
    layout = StateLayout(
        cache_argument=argument,
        shapes=shapes,
        modules=modules,
        empty_layers=DynamicCache(config=module.config).layers,
        shares_attention=cache.shares_attention,
    )
    return RecordedStates(layout, calls)


def _note_calls(path: str, module: nn.Module, running: list[_Call]) -> Callable[[], None]:
    """Keep ``running`` up to date as the module of this path is called. Returns what ends that."""

    def begin(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        running.append(_Call(path, args, kwargs))

    def end(*_: object) -> None:
        running.pop()

    before = module.register_forward_pre_hook(begin, with_kwargs=True)
    after = module.register_forward_hook(end)

    def remove() -> None:
        before.remove()
        after.remove()

    return remove


@torch.inference_mode()
def try_modules(module: PreTrainedModel, recorded: RecordedStates) -> StateLayout:
    """The layout, with what each module can do. One of each class is tried, on the input that it
    had before. Raises UnsupportedModelError if one goes on in neither way."""
    layout = recorded.layout
    by_token: dict[type, bool] = {}
    modules = []
    for each in layout.modules:
        child: Any = module.get_submodule(each.path)
        kind = type(child)
        if kind not in by_token:
            trial = _Trial(layout, recorded.calls[each.path], child.forward)
            by_token[kind] = not trial.goes_on(each)
            if by_token[kind] and not trial.goes_on(replace(each, by_token=True)):
                raise unservable(
                    module.config.model_type,
                    f"{kind.__name__} does not go on after the state that it has left",
                )
        modules.append(replace(each, by_token=by_token[kind]))
    return replace(layout, modules=modules)


@dataclass(frozen=True)
class _Trial:
    """Runs one module in steps, and all at once."""

    layout: StateLayout
    call: _Call
    forward: Callable[..., Any]

    def goes_on(self, module: StateModule) -> bool:
        """Whether the module gives the same results in steps of several tokens and of one."""
        num_tokens = _CHUNKS[-1][1]
        whole = self._run(self.forward, slice(0, num_tokens), None)
        in_rows = RowForward(module, self.forward)
        device = whole.device
        slots = StateSlots(self.layout, num_slots=1, device=device)
        results = []
        for first, last in _CHUNKS:
            row = RowSlot(slot=0, first=0, num_tokens=last - first, is_new=first == 0)
            try:
                result = self._run(in_rows, slice(first, last), SlotCache(slots, [row]))
            except (RuntimeError, ValueError, IndexError):
                return False  # its code is for a whole prompt or one token
            results.append(result)
        right = whole.float()
        difference = (torch.cat(results, 1).float() - right).norm(dim=-1)
        error = float(difference.max() / right.norm(dim=-1).mean())
        # Not ``>``: that is false if it is NaN.
        return error <= _TOLERANCE[whole.dtype]

    def _run(self, forward: Callable[..., Any], tokens: slice, cache: Cache | None) -> Tensor:
        """The result for some of the tokens, [1, tokens, width], with this cache."""
        group = RowGroup(tokens, slots=slice(0, 1), is_new=False, is_batch=False)
        num_tokens = _CHUNKS[-1][1]
        args = [group.take(value, num_tokens, cache) for value in self.call.args]
        kwargs = {
            name: group.take(value, num_tokens, cache) for name, value in self.call.kwargs.items()
        }
        kwargs.pop("paged", None)
        output = forward(*args, **kwargs)
        result: Tensor = output[0] if isinstance(output, tuple) else output
        return result
