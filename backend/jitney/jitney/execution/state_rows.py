"""Runs modules with states over the flattened tokens of a step.

transformers' modules take sequences of one length, each with its state. A step has rows of any
length, one behind the other. So the ``forward`` of each such module is replaced, once, by a
:class:`RowForward`. It groups the rows, calls the module's own ``forward`` for each group with the
states of its rows, and puts the results where the rows stand:

- Rows of one token each that go on after a state are one batch, [rows, 1, width].
- Any other row is a batch of one, [1, tokens, width]. If the module goes on by one token at a time
  only, a row that does is a sequence of such batches instead, beside the others of its kind.

The step reaches it as the cache that the model is called with (:class:`SlotCache`). Without one,
the module runs as transformers wrote it.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor, nn
from transformers.cache_utils import Cache, DummyLayer, LinearAttentionLayer

from jitney.execution.attention import RowSlot
from jitney.execution.state_slots import SlotIndex, StateModule, StateSlots


class RowGroup(NamedTuple):
    """Rows that a module computes in one call."""

    tokens: slice | Tensor
    """Their indices among the T tokens of the step."""
    slots: SlotIndex
    is_new: bool
    """Whether they begin: they have no state yet."""
    is_batch: bool
    """Whether there is one token for each of them. Else it is one row."""

    @property
    def size(self) -> tuple[int, int]:
        """Its rows, and the tokens of each."""
        if isinstance(self.tokens, slice):
            count = self.tokens.stop - self.tokens.start
        else:
            count = len(self.tokens)
        return (count, 1) if self.is_batch else (1, count)

    def take(self, value: Any, num_tokens: int, cache: Cache | None) -> Any:
        """An argument of the module, for this group: of a tensor [1, T, …], and of those in a
        tuple or list, its tokens as [rows, tokens, …]; in place of a cache, ``cache``; anything
        else as it is."""
        if isinstance(value, Cache):
            return cache
        if isinstance(value, tuple | list):
            return type(value)(self.take(each, num_tokens, cache) for each in value)
        if not isinstance(value, Tensor) or value.shape[:2] != (1, num_tokens):
            return value
        if self.is_batch:
            return value[0, self.tokens].unsqueeze(1)
        return value[:, self.tokens]

    def put(self, result: Tensor, whole: Tensor) -> None:
        """Write the group's result [rows, tokens, …] into that of the step, [1, T, …]."""
        if self.is_batch:
            whole[0, self.tokens] = result.squeeze(1)
        else:
            whole[:, self.tokens] = result


class SlotCache(Cache):
    """The cache that a model is called with in one step. It keeps no K and V: attention reads them
    from blocks (see ``interface``)."""

    def __init__(self, slots: StateSlots, rows: Sequence[RowSlot]) -> None:
        """``rows`` are all rows of the step, in the order of their tokens."""
        super().__init__(layers=slots.layout.empty_layers)
        self.slots = slots
        self.attending = 0
        """The layer whose attention is about to be called."""
        self._rows = rows
        self._groups: dict[bool, list[RowGroup]] = {}

    @cached_property
    def row_table(self) -> np.ndarray:
        """The rows as int64 [rows, fields of RowSlot], for kernels."""
        return np.array(self._rows, np.int64)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Called by attention, just before it attends."""
        self.attending = layer_idx
        return key_states, value_states

    def groups(self, by_token: bool) -> list[RowGroup]:
        """The rows in groups, in the order in which they must be computed. ``by_token``: a row goes
        on after its state by one token at a time."""
        if by_token not in self._groups:
            self._groups[by_token] = self._make_groups(by_token)
        return self._groups[by_token]

    def _make_groups(self, by_token: bool) -> list[RowGroup]:
        groups = []
        going_on: list[RowSlot] = []  # those that are computed token by token
        for row in self._rows:
            if not row.is_new and (by_token or row.num_tokens == 1):
                going_on.append(row)
                continue
            groups.append(
                RowGroup(
                    tokens=slice(row.first, row.first + row.num_tokens),
                    slots=self.slots.index_of([row.slot]),
                    is_new=row.is_new,
                    is_batch=False,
                )
            )
        # Slots that follow each other are read and written where they are, without a copy.
        going_on.sort(key=lambda row: row.slot)
        longest = max((row.num_tokens for row in going_on), default=0)
        for offset in range(longest):
            rows = [row for row in going_on if row.num_tokens > offset]
            groups.append(
                RowGroup(
                    tokens=self.slots.index_of([row.first + offset for row in rows]),
                    slots=self.slots.index_of([row.slot for row in rows]),
                    is_new=False,
                    is_batch=True,
                )
            )
        return groups


def find_cache(arguments: Iterable[Any]) -> SlotCache | None:
    """The cache among the arguments with which transformers calls a module, if there is one."""
    return next((value for value in arguments if isinstance(value, SlotCache)), None)


class StatesCache(Cache):
    """transformers' cache, with the methods that MiniMax has for its one state."""

    def get_linear_cache(self, layer_idx: int) -> Tensor | None:
        states: Any = self.layers[layer_idx]
        return states.recurrent_states[0] if states.is_recurrent_states_initialized[0] else None

    def set_linear_cache(self, layer_idx: int, linear_cache: Tensor) -> None:
        states: Any = self.layers[layer_idx]
        states.update_recurrent_state(linear_cache)


_NO_STATES = DummyLayer()


def _cache_of_layer(layer: int, states: LinearAttentionLayer) -> StatesCache:
    """The cache that a module of this layer gets for one group of rows."""
    before: list[Any] = [_NO_STATES] * layer
    return StatesCache(layers=[*before, states])


class RowForward:
    """Stands in place of the ``forward`` of a module with states."""

    def __init__(self, module: StateModule, forward: Callable[..., Any]) -> None:
        """``forward``: the module's own."""
        self._module = module
        self.own_forward = forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As transformers calls the module. Of a tuple that it returns, tensors that do not have
        the step's tokens become None."""
        values = [*args, *kwargs.values()]
        cache = find_cache(values)
        # Modules hand what they do not know on to functions that do not know it either.
        kwargs.pop("paged", None)
        if cache is None:
            return self.own_forward(*args, **kwargs)
        x = next(value for value in values if isinstance(value, Tensor))
        num_tokens = x.shape[1]
        results = _StepResults(num_tokens)
        for group in cache.groups(self._module.by_token):
            results.add(group, self._run(group, num_tokens, cache.slots, args, kwargs))
        return results.whole()

    def _run(
        self,
        group: RowGroup,
        num_tokens: int,
        slots: StateSlots,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """What the module returns for one group."""
        keys = self._module.keys
        states = slots.empty(keys) if group.is_new else slots.read(keys, group.slots)
        cache = _cache_of_layer(self._module.layer, states)
        own_args = [group.take(value, num_tokens, cache) for value in args]
        own = {name: group.take(value, num_tokens, cache) for name, value in kwargs.items()}
        output = self.own_forward(*own_args, **own)
        slots.write(keys, group.slots, states)
        return output


class _StepResults:
    """Puts together what a module returns for the groups of a step: a tensor, or a tuple."""

    def __init__(self, num_tokens: int) -> None:
        self._num_tokens = num_tokens
        self._is_tuple = False
        self._wholes: list[Tensor | None] = []

    def add(self, group: RowGroup, output: Any) -> None:
        """``output`` is the group's."""
        self._is_tuple = isinstance(output, tuple)
        parts = output if self._is_tuple else (output,)
        if not self._wholes:
            self._wholes = [None] * len(parts)
        for number, part in enumerate(parts):
            if not isinstance(part, Tensor) or part.shape[:2] != group.size:
                continue
            whole = self._wholes[number]
            if whole is None:
                whole = part.new_empty(1, self._num_tokens, *part.shape[2:])
                self._wholes[number] = whole
            group.put(part, whole)

    def whole(self) -> Any:
        """The module's result for the step."""
        return tuple(self._wholes) if self._is_tuple else self._wholes[0]


def replace_forwards(module: nn.Module, modules: Sequence[StateModule]) -> None:
    """From now on these modules compute the rows of a step; see above."""
    for each in modules:
        child: Any = module.get_submodule(each.path)
        child.forward = RowForward(each, child.forward)
