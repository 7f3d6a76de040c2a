"""Weights on their way from the checkpoint's files to the device, and what they take there.

transformers reads the files: it knows every rename and merge between a checkpoint and its modules.
A tensor that it reads onto the CPU, in the dtype that the file has, is a view of the mapped file.
So nothing is copied before the tensor is sent to a device, straight from the page cache.
"""

import json
import logging
import re
import tempfile
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.utils import is_accelerate_available
from transformers.utils import logging as hf_logging

from jitney.errors import CheckpointError, LoadError, first_line
from jitney.execution import interface
from jitney.execution.checkpoint import CONFIG, INDEX, Checkpoint
from jitney.execution.interface import KvScales
from jitney.execution.machine import is_out_of_memory
from jitney.execution.text_half import KEY_MAPPING, is_text_half

_log = logging.getLogger(__name__)

_THREADS = 4
"""Threads that send tensors to a device. They copy from pageable memory. With one thread, its core
limits the speed, because it handles all page faults and copies all bytes. With more than these,
threads wait for each other: they share the lock of the process's address space."""
_AHEAD = 6
"""Tensors sent ahead of the one in use: bounds what the device holds beside the module."""
_CACHE_SCALE = re.compile(r"(?:^|\.)layers\.(\d+)\.self_attn\.([kv])_scale$")
"""Name of a tensor with scales of the KV cache; matches its layer's number, and k or v."""


def read_weights(
    checkpoint: Checkpoint,
    hf_config: PreTrainedConfig,
    dtype: torch.dtype,
    device: torch.device | None = None,
    skip: Collection[str] = (),
    given: dict[str, Any] | None = None,
    *,
    keeps_own_attention: bool = False,
) -> PreTrainedModel:
    """The module of ``checkpoint`` in ``dtype``. ``skip``: tensors of a GGUF file that stay unread.
    ``given``: what is read in place of the files (``WeightFormat.given_tensors``).
    ``keeps_own_attention``: it attends by transformers' own functions, not by ours.

    With a ``device``, transformers moves each tensor there as it reads it, if it can. Else the
    module is on the CPU, for the caller to move. A tensor that the model needs and the files lack
    is a CheckpointError: transformers would fill it at random. Raises MemoryError if there is too
    little memory.
    """
    interface.register()
    name = weights_name(checkpoint)
    device_map: dict[str, torch.device] | None = None
    if device is not None and device.type != "cpu":
        if is_accelerate_available():
            device_map = {"": device}
        else:
            _log.info(
                "package accelerate is missing or old: weights are read onto the CPU first, where "
                "a model with experts needs memory to stack their tensors"
            )
    try:
        with _no_progress_bar():
            module, report = _from_pretrained(
                checkpoint,
                hf_config=hf_config,
                dtype=dtype,
                skip=skip,
                given=given,
                device_map=device_map,
                keeps_own_attention=keeps_own_attention,
            )
    except LoadError:
        raise
    except Exception as error:  # shapes that do not fit, headers newer than the library, …
        if is_out_of_memory(error):
            raise MemoryError(str(error)) from error
        reason = first_line(error, checkpoint.folder)
        raise CheckpointError(f"{name} cannot be loaded: {reason}") from error
    _refuse_keys(f"{name} lacks", report["missing_keys"])
    _refuse_keys(f"{name} has a wrong shape of", report["mismatched_keys"])
    if checkpoint.gguf is not None:
        checkpoint.gguf.finish(module)
    if not keeps_own_attention:
        interface.set_attention(module, interface.NAME)
    return module


def _from_pretrained(
    checkpoint: Checkpoint,
    hf_config: PreTrainedConfig,
    dtype: torch.dtype,
    skip: Collection[str],
    given: dict[str, Any] | None,
    device_map: dict[str, torch.device] | None,
    *,
    keeps_own_attention: bool,
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """The module, and transformers' report of tensors that are missing or do not fit."""
    if checkpoint.lacks_index and given is None:
        with _folder_with_index(checkpoint) as folder:
            named = replace(checkpoint, folder=folder, lacks_index=False)
            return _from_pretrained(
                named,
                hf_config=hf_config,
                dtype=dtype,
                skip=skip,
                given=given,
                device_map=device_map,
                keeps_own_attention=keeps_own_attention,
            )
    source: Path | None = checkpoint.folder
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(hf_config)]
    cls: Any = AutoModelForCausalLM
    options: dict[str, Any] = {}
    if not keeps_own_attention:
        options["attn_implementation"] = interface.first_attention(model_class)
    if device_map is not None:
        options["device_map"] = device_map
    if is_text_half(checkpoint, hf_config):
        options["key_mapping"] = KEY_MAPPING
    if checkpoint.gguf is not None:
        names = checkpoint.tensors.keys() - skip
        given = {name: checkpoint.gguf.floats(name, dtype) for name in names}
    if given is not None:
        # AutoModelForCausalLM would look for a folder; the architecture's own class does not.
        source = None
        cls = model_class
        options["state_dict"] = given
    loaded: tuple[PreTrainedModel, dict[str, Any]] = cls.from_pretrained(
        source,
        config=hf_config,
        dtype=dtype,
        use_safetensors=True,
        local_files_only=True,
        trust_remote_code=False,
        output_loading_info=True,
        **options,
    )
    return loaded


@contextmanager
def _folder_with_index(checkpoint: Checkpoint) -> Iterator[Path]:
    """A folder with links to the weight files and an index of their tensors, for transformers. It
    may be removed once the files are mapped."""
    with tempfile.TemporaryDirectory(prefix="jitney-") as name:
        folder = Path(name)
        for file in (*checkpoint.weight_files, CONFIG):
            (folder / file).symlink_to((checkpoint.folder / file).resolve())
        weight_map = {tensor: stored.file for tensor, stored in checkpoint.tensors.items()}
        index = {"metadata": {"total_size": checkpoint.num_bytes}, "weight_map": weight_map}
        (folder / INDEX).write_text(json.dumps(index))
        yield folder


@contextmanager
def _no_progress_bar() -> Iterator[None]:
    """A context in which transformers draws none: a server's log is no terminal."""
    was_enabled = hf_logging.is_progress_bar_enabled()
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            hf_logging.enable_progress_bar()


def _refuse_keys(text: str, keys: Collection[Any]) -> None:
    """Raise CheckpointError, ``text`` and the first names, if there are any keys. transformers
    gives a key as the tensor's name, or as a tuple of the name and two shapes."""
    if not keys:
        return
    names = sorted(str(key[0] if isinstance(key, tuple) else key) for key in keys)
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    raise CheckpointError(f"{text} {', '.join(names[:3])}{more}")


def weights_name(checkpoint: Checkpoint) -> str:
    """The weight file, or the first of several, for an error message."""
    first, *others = checkpoint.weight_files
    return f"{first} (or one of {len(others)} more)" if others else first


def stream(tensors: Iterable[Tensor], device: torch.device) -> Iterator[Tensor]:
    """Each tensor on ``device``, in order, while threads send the next few. A tensor that is there
    already is given as it is."""
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="weights") as pool:
        sent: deque[Future[Tensor]] = deque()
        for tensor in tensors:
            sent.append(pool.submit(torch.Tensor.to, tensor, device))
            del tensor  # so that its memory is freed once it was sent
            if len(sent) > _AHEAD:
                yield sent.popleft().result()
        while sent:
            yield sent.popleft().result()


def cache_scales(
    checkpoint: Checkpoint, kv_heads: Sequence[int], device: torch.device
) -> dict[int, KvScales]:
    """The scales that a checkpoint states for a float8 cache, by layer, on ``device``. Layers for
    which it states only one of the two are left out. ``kv_heads``: how many each layer of the model
    has.

    Raises CheckpointError for scales that are neither one for the layer nor one per KV head.
    """
    found: dict[int, dict[str, Tensor]] = {}  # by layer, then by k or v
    for name, stored in checkpoint.tensors.items():
        match = _CACHE_SCALE.search(name)
        if match is None:
            continue
        layer = int(match[1])
        letter = match[2]
        if layer >= len(kv_heads):
            # Some checkpoints have a layer behind the model's, which predicts further tokens
            # (GLM-4.5). transformers does not load it.
            continue
        heads = kv_heads[layer]
        with safe_open(str(checkpoint.folder / stored.file), framework="pt") as file:
            scale = file.get_tensor(name).float().flatten()
        if len(scale) not in (1, heads):
            raise CheckpointError(f"the cache scales of layer {layer} are not one, or one per head")
        of_layer = found.setdefault(layer, {})
        of_layer[letter] = scale.to(device).expand(heads).contiguous()
    complete = {}
    for layer, of_layer in found.items():
        if len(of_layer) == 2:
            complete[layer] = KvScales(key=of_layer["k"], value=of_layer["v"])
    return complete


def count_bytes(module: nn.Module) -> int:
    """Bytes of all parameters and buffers as they are stored."""
    return sum(stored_bytes(each) for each in [*module.parameters(), *module.buffers()])


def stored_bytes(tensor: Tensor) -> int:
    """Bytes of a tensor. One of torchao's consists of several tensors: their bytes together."""
    if is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        return sum(stored_bytes(getattr(tensor, name)) for name in names)
    return tensor.numel() * tensor.element_size()
