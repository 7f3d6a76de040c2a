"""A tiny random checkpoint of any type that transformers can generate text with.

make_checkpoint(folder, "qwen3_next")
"""

from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from benchmarks.architectures.shapes import OWN, SMALL, TOWER

MOST_PARAMETERS = 3_000_000


class NotMadeError(Exception):
    """No tiny checkpoint of a type can be made; the text says why."""


def all_types() -> list[str]:
    """The model types that transformers lists as causal language models."""
    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def make_config(model_type: str) -> PreTrainedConfig:
    """The small configuration of a type. Raises whatever transformers raises."""
    cls = transformers.CONFIG_MAPPING[model_type]
    return cls(**_small_fields(cls, SMALL))


def _small_fields(cls: type[PreTrainedConfig], sizes: dict[str, Any]) -> dict[str, Any]:
    """What a configuration of this class is made of: sizes, those of its parts, and its own."""
    known = set(cls.__dataclass_fields__)
    fields = {name: value for name, value in sizes.items() if name in known}
    for name, part in (getattr(cls, "sub_configs_defaults", None) or {}).items():
        part_cls = _class_of_part(part)
        part_sizes = SMALL if _is_text(name) else TOWER
        fields[name] = _small_fields(part_cls, part_sizes)
        if part_cls.model_type != cls.model_type:
            fields[name]["model_type"] = part_cls.model_type
    for name, value in OWN.get(cls.model_type, {}).items():
        is_part = name in fields and isinstance(fields[name], dict)
        fields[name] = {**fields[name], **value} if is_part else value
    return fields


def _class_of_part(part: Any) -> type[PreTrainedConfig]:
    """``part`` is a class of configurations, or says which one is the default."""
    if isinstance(part, type):
        return part
    cls: type[PreTrainedConfig] = transformers.CONFIG_MAPPING[part.model_type]
    return cls


def _is_text(name: str) -> bool:
    """Whether a part of this name is the language model, and not a tower."""
    return not any(word in name for word in ("vision", "audio", "vq", "image"))


def make_model(config: PreTrainedConfig, seed: int = 0) -> nn.Module:
    """A random model in float32 and in eval mode, with logits far enough apart for greedy tokens to
    be the same in any order of additions. Raises NotMadeError if it would be large."""
    with torch.device("meta"):
        skeleton = transformers.AutoModelForCausalLM.from_config(config)
    size = sum(parameter.numel() for parameter in skeleton.parameters())
    if size > MOST_PARAMETERS:
        raise NotMadeError(f"it has {size:,} parameters, and at most {MOST_PARAMETERS:,} are made")
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    spread(model, torch.Generator().manual_seed(seed))
    if model.can_generate():
        model.generation_config.eos_token_id = None
    model.eval()
    return model


def spread(model: nn.Module, generator: torch.Generator) -> None:
    """Draw weights of products and embeddings wide: as a model draws them itself, most of what a
    token does is lost on the way, and a wrong mask or position would not show."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim == 1:
                # Norms, biases, decay rates: what the model drew, a little apart.
                parameter.add_(noise, alpha=0.05)
            elif "embed" in name or "wte" in name or "wpe" in name:
                parameter.copy_(noise)
            elif parameter.ndim == 2 and "A_log" not in name:
                parameter.copy_(noise / parameter.shape[-1] ** 0.5)
        head = model.get_output_embeddings()
        if head is not None and isinstance(getattr(head, "weight", None), torch.Tensor):
            head.weight.mul_(3.0)


def make_checkpoint(folder: Path, model_type: str, seed: int = 0) -> Path:
    """Write the checkpoint of a type. Raises NotMadeError."""
    try:
        model = make_model(make_config(model_type), seed)
    except NotMadeError:
        raise
    except Exception as error:
        first = str(error).strip().split("\n")[0]
        raise NotMadeError(f"{type(error).__name__}: {first}") from error
    model.save_pretrained(folder)
    return folder
