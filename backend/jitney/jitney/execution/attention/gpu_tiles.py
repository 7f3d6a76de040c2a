"""Tile sizes of the attention kernels: a small table by device, dtype and head size."""

from typing import NamedTuple

import torch

_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn)
_LARGEST_GROUP = 128


class Tiles(NamedTuple):
    """Sizes of one attention kernel."""

    decode_rows: int
    """Rows of a tile that holds one token: the query heads of a KV head, padded."""
    chunk_rows: int
    """Rows of a tile of several tokens: query heads times tokens."""
    block_n: int
    """Keys of a tile."""
    warps: int
    stages: int
    """Tiles of K and V under way at once."""
    least_part: int
    """A part of a context has at least so many keys."""
    programs: int
    """Programs that fill the device."""


def why_not(
    device: torch.device, dtype: torch.dtype, head_size: int, num_heads: int, num_kv_heads: int
) -> str | None:
    """Why the kernels cannot run, or None if they can. ``dtype`` is the cache's."""
    name = str(dtype).removeprefix("torch.")
    if dtype not in _DTYPES:
        known = ", ".join(str(each).removeprefix("torch.") for each in _DTYPES)
        return f"the GPU's kernels have caches of {known}, not {name}"
    if head_size % 8 or not 16 <= head_size <= 256:
        return f"the GPU's kernels have head sizes from 16 to 256 in steps of 8, not {head_size}"
    group = num_heads // num_kv_heads
    if num_heads % num_kv_heads or group > _LARGEST_GROUP:
        return (
            f"the GPU's kernels have up to {_LARGEST_GROUP} query heads for each KV head, "
            f"not {num_heads} for {num_kv_heads}"
        )
    if device.type == "cuda":
        have = torch.cuda.get_device_capability(device)
        need = (8, 9) if dtype == torch.float8_e4m3fn else (8, 0)
        if have < need:
            return (
                f"the GPU's kernels for caches of {name} need compute capability "
                f"{need[0]}.{need[1]}, but {device} has {have[0]}.{have[1]}"
            )
    return None


def tiles_for(
    device: torch.device, dtype: torch.dtype, head_size: int, group: int, batch_invariant: bool
) -> Tiles:
    """The table's line."""
    padded = 16
    while padded < group:
        padded *= 2
    processors = 132
    if device.type == "cuda":
        processors = torch.cuda.get_device_properties(device).multi_processor_count
    if dtype == torch.float32:
        return Tiles(padded, max(32, padded), 32, 4, 2, 256, 4 * processors)
    return Tiles(padded, max(64, padded), 64, 4, 3, 256, 4 * processors)
