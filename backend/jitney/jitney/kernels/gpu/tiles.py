"""What the GPU's attention kernels can do, and their tile sizes: a small table by device, dtype and
head size.

``attention_tile`` says what a tile is. There is no tuning at run time: a step's speed does not
depend on what came before it.

Called by ``gpu_accelerator`` and ``gpu_attention``.
"""

from typing import NamedTuple

import torch

_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn)
"""Of the cache."""
_LARGEST_GROUP = 128
"""Query heads that share a KV head, at most: they must fit into a tile."""
_LEAST_PART = 256
"""Keys that a part of a context has at least."""
_LARGE_SHARED_MEMORY = ((8, 0), (9, 0), (10, 0), (10, 3))
"""Compute capabilities (major, minor) where a program may have at least 163 KiB of shared memory:
those of A100, H100, B200 and B300. With the others it may have 99 KiB."""
_TILE_ELEMENTS = 64 * 128
"""Elements of a key tile of K, and of one of V: 64 keys of 128 elements, or fewer keys of larger
heads. With 16 bits each, both together are 32 KiB: one stage."""


class Tiles(NamedTuple):
    """Sizes of one attention kernel; in brackets, the kernel's names."""

    decode_rows: int
    """Rows of a tile with one token: the query heads of a KV head, padded (DECODE_ROWS)."""
    chunk_rows: int
    """Rows of a tile with several tokens: query heads times tokens (CHUNK_ROWS)."""
    block_n: int
    """Keys of a key tile (BLOCK_N)."""
    warps: int
    """Warps of a program."""
    stages: int
    """Key tiles of K and V that are on their way from memory or in use at a time."""
    least_part: int
    """Keys that a part of a context has at least (MIN_PART)."""
    programs: int
    """Programs that keep the device busy. Where a step of decodes has fewer, contexts are cut into
    parts."""


class TileTable(NamedTuple):
    """Tiles by kind of step."""

    decodes: Tiles
    """For steps of one token per row."""
    mixed: Tiles
    """For all others."""


def why_not(
    device: torch.device, dtype: torch.dtype, head_size: int, num_heads: int, num_kv_heads: int
) -> str | None:
    """Why the kernels cannot run, or None if they can. ``dtype`` is the cache's, ``num_heads`` that
    of query heads."""
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
) -> TileTable:
    """The table's line for a device."""
    # The interpreter takes the line of an H100.
    capability = (9, 0)
    processors = 132
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        processors = torch.cuda.get_device_properties(device).multi_processor_count
    return look_up(
        capability=capability,
        processors=processors,
        dtype=dtype,
        head_size=head_size,
        group=group,
        batch_invariant=batch_invariant,
    )


def look_up(
    capability: tuple[int, int],
    processors: int,
    dtype: torch.dtype,
    head_size: int,
    group: int,
    batch_invariant: bool,
) -> TileTable:
    """The table. ``dtype`` is the cache's, ``group`` the query heads for each KV head,
    ``processors`` the device's multiprocessors.

    How the sizes were chosen:

    - A step of decodes waits for memory. To keep the memory busy, so many bytes must be under way:
      its latency times its bandwidth. A program has up to two stages on their way to shared memory,
      while it computes on another one, which is in registers by then. A stage is 32 KiB, or 16 with
      8 bits. There is room for three programs on a multiprocessor. They have 192 KiB, or 96, under
      way: three times what keeps the memory busy. So two programs for each multiprocessor are
      enough (``programs``): contexts are not cut into more parts to have a third one.
    - In a mixed step one program of 8 warps computes 128 rows, so each K and V that comes from the
      L2 cache is used 128 times.
    - On an H100 other sizes made decodes, and the first chunk of a prompt, at most 7 % faster
      (docs/benchmarks.md).
    """
    head_tile = max(64, _power_of_2(head_size))
    decode_rows = max(16, _power_of_2(group))
    if dtype == torch.float32:
        table = _without_matrix_units(head_tile, decode_rows, processors)
    else:
        table = _with_matrix_units(head_tile, decode_rows, processors, capability)
    if not batch_invariant:
        return table
    # The same tiles for one token and for many: both run the same instructions in the same order.
    # Half as many rows as in a mixed step: a decode fills few of them.
    rows = max(table.mixed.chunk_rows // 2, decode_rows)
    tiles = table.mixed._replace(decode_rows=rows, chunk_rows=rows)
    return TileTable(tiles, tiles)


def _power_of_2(number: int) -> int:
    """The least power of 2 that is not below ``number``."""
    return 1 << (number - 1).bit_length()


def _without_matrix_units(head_tile: int, decode_rows: int, processors: int) -> TileTable:
    """For float32, whose products are computed without matrix units. ``head_tile`` is the elements
    of a head, padded."""
    # A row's sums stay in registers: fewer rows of larger heads.
    most_rows = 32 if head_tile <= 128 else 16
    tiles = Tiles(
        decode_rows=decode_rows,
        chunk_rows=max(most_rows, decode_rows),
        block_n=32 if head_tile <= 64 else 16,
        warps=4 if head_tile <= 64 else 8,
        stages=2,
        least_part=_LEAST_PART,
        programs=2 * processors,
    )
    return TileTable(tiles, tiles)


def _with_matrix_units(
    head_tile: int, decode_rows: int, processors: int, capability: tuple[int, int]
) -> TileTable:
    """For 16 and 8 bits. ``head_tile`` is the elements of a head, padded."""
    keys = max(16, _TILE_ELEMENTS // head_tile)
    decodes = Tiles(
        decode_rows=decode_rows,
        chunk_rows=decode_rows,
        block_n=keys,
        warps=4,
        stages=3,
        least_part=_LEAST_PART,
        programs=2 * processors,
    )
    mixed = decodes._replace(chunk_rows=128, block_n=min(keys, 64), warps=8)
    fewer_rows = max(64, decode_rows)
    if head_tile == 256 and capability < (9, 0):
        # The sums of 128 rows would not fit into the registers.
        mixed = mixed._replace(chunk_rows=fewer_rows)
    if capability not in _LARGE_SHARED_MEMORY:
        # Queries, and K and V of all stages, must fit into 99 KiB.
        mixed = mixed._replace(chunk_rows=fewer_rows, block_n=keys // 2, stages=2)
    return TileTable(decodes, mixed)
