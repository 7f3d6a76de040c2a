"""Rotary scalings whose factors transformers chooses anew in each step, by the longest sequence of
the batch. Served so, a request's tokens would depend on its neighbours, and keys that were cached
before a change would be wrong after it. So the factors are chosen once, at load, by the length of
the longest sequence that can come. Called by ``read_model``.

- ``longrope`` (Phi 3 with 128k, Phi 3.5, Phi 4 mini) has short factors for sequences up to
  ``original_max_position_embeddings`` and long ones beyond. With a ``max_model_len`` up to that all
  sequences have the short ones, with a larger one all have the long ones, as in vLLM. Then short
  sequences differ from those of transformers.
- ``dynamic`` changes nothing before ``max_position_embeddings``, and ``max_model_len`` is never
  larger. With ``alpha``, as Hunyuan has it, it does not depend on lengths at all.
"""

import logging
from typing import Any

from transformers import PreTrainedConfig

_log = logging.getLogger(__name__)

_FACTORS = ("short_factor", "long_factor")
"""Names of what longrope has for short sequences and for long ones."""
_SCALES = ("short_mscale", "long_mscale")
"""The same of Phi 3.5 MoE, which has both. transformers chooses these alone by the length: its
module of that type takes the short factors at all lengths, and so does ours."""
_ORIGINAL = "original_max_position_embeddings"


def settle_factors(config: PreTrainedConfig, max_model_len: int) -> None:
    """Write into ``config`` that one set of factors holds for all lengths up to
    ``max_model_len``."""
    parameters = getattr(config, "rope_parameters", None)
    if isinstance(parameters, dict):
        _settle(parameters, config, max_model_len)


def _settle(parameters: dict[str, Any], config: PreTrainedConfig, max_model_len: int) -> None:
    kind = parameters.get("rope_type")
    if kind == "longrope":
        _settle_longrope(parameters, config, max_model_len)
    elif kind == "dynamic" and not parameters.get("alpha"):
        parameters["rope_type"] = "default"
    for value in parameters.values():
        if isinstance(value, dict):  # one for each type of layers
            _settle(value, config, max_model_len)


def _settle_longrope(
    parameters: dict[str, Any], config: PreTrainedConfig, max_model_len: int
) -> None:
    original = parameters.get(_ORIGINAL) or getattr(config, _ORIGINAL)
    is_long = max_model_len > original
    short, long = _SCALES if _SCALES[0] in parameters else _FACTORS
    chosen = parameters[long if is_long else short]
    parameters[short] = chosen
    parameters[long] = chosen
    relation = "more than" if is_long else "at most"
    _log.info(
        "its rotary scaling is longrope: %s factors for all positions, as max_model_len is %s the "
        "original %s tokens",
        "long" if is_long else "short",
        relation,
        f"{original:,}",
    )
