"""Models whose learned positions begin behind the padding token's number: RoBERTa and its
relatives. If they count themselves, position p of a sequence is row ``pad_token_id + 1 + p`` of
their table. Positions that they are given are taken as rows: so here the offset is added to these.

Called by ``read_model`` and ``support``.
"""

from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

_TYPES = frozenset({
    "camembert", "data2vec-text", "roberta", "roberta-prelayernorm", "xlm-roberta",
    "xlm-roberta-xl", "xmod",
})  # fmt: skip


def position_offset(config: PreTrainedConfig) -> int:
    """The row of position 0 in the model's table of positions."""
    if config.model_type not in _TYPES:
        return 0
    padding: int | None = config.pad_token_id
    return 0 if padding is None else padding + 1


def add_position_offset(module: PreTrainedModel) -> None:
    """Let ``module`` take positions that begin at 0."""
    offset = position_offset(module.config)
    if offset == 0:
        return

    def add(
        _: nn.Module, args: tuple[Any, ...], arguments: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        positions = arguments.get("position_ids")
        if positions is None:
            return None
        return args, {**arguments, "position_ids": positions + offset}

    for each in module.modules():
        if hasattr(each, "create_position_ids_from_input_ids"):
            each.register_forward_pre_hook(add, with_kwargs=True)
