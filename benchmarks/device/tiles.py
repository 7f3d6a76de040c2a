"""Part ``tiles``: the attention kernels with other tile sizes than the table's.

One run on a device gives the data for that device's line in ``kernels/gpu/tiles.py``: every variant
stands in the JSON file, the best of them in the table.
"""

from functools import partial

import torch

from benchmarks.device.attention import (
    CHUNKS,
    DECODES,
    TINY_CHUNKS,
    TINY_DECODES,
    rotated,
    time_batches,
)
from benchmarks.device.environment import device_of
from benchmarks.device.paged import Case, function_of
from benchmarks.device.supervise import Bench, device_is_gone

# Fields of tiles.Tiles that are tried instead of the table's, each list for one kind of step.
DECODE_TILES: list[dict[str, int]] = [
    {"block_n": 32}, {"block_n": 128}, {"block_n": 128, "stages": 2}, {"stages": 2}, {"stages": 4},
    {"warps": 2}, {"warps": 8}, {"block_n": 128, "warps": 8}, {"block_n": 32, "stages": 4},
]  # fmt: skip
PART_TILES: list[dict[str, int]] = [
    {"programs": 132}, {"programs": 4 * 132}, {"programs": 8 * 132}, {"least_part": 128},
]  # fmt: skip
CHUNK_TILES: list[dict[str, int]] = [
    {"stages": 2}, {"block_n": 128, "stages": 2}, {"block_n": 128}, {"chunk_rows": 64, "warps": 4},
    {"stages": 4}, {"warps": 4}, {"chunk_rows": 256},
]  # fmt: skip


def run(bench: Bench) -> None:
    """As many variants as there is time for."""
    device = device_of(bench)
    decodes = TINY_DECODES if bench.tiny else DECODES
    chunks = TINY_CHUNKS if bench.tiny else CHUNKS
    small = decodes[0] if bench.tiny else decodes[3]
    for (case, _), variants in (
        (decodes[0], DECODE_TILES),
        (chunks[0], CHUNK_TILES),
        (small, PART_TILES),
    ):
        tried = variants[:1] if bench.tiny else variants
        bench.case(case.name, partial(_variants, bench, case, tried, device), seconds=8)


def _variants(
    bench: Bench, case: Case, variants: list[dict[str, int]], device: torch.device
) -> None:
    """Times of other tiles than the table's, the best in the table, all in the file."""
    batches = rotated(bench, case, device)
    usual = function_of(case, device)
    one_each = case.tokens == len(case.spans)
    base = usual.tiles.decodes if one_each else usual.tiles.mixed
    seconds = 0.0 if bench.tiny else 0.2
    times = {"table": 1e6 * time_batches(batches, usual, device, seconds).seconds}
    failed: dict[str, str] = {}
    for fields in variants:
        if bench.left < 6:
            break
        label = ", ".join(f"{key}={value}" for key, value in fields.items())
        try:
            attend = function_of(case, device, tiles=base._replace(**fields))
            times[label] = 1e6 * time_batches(batches, attend, device, seconds).seconds
        except Exception as error:  # too much shared memory, say: the others are of interest
            failed[label] = f"{type(error).__name__}: {error}"
            if device_is_gone():
                break
    best = min(times, key=lambda label: times[label])
    bench.add(
        case.name, value=times[best], unit="µs", ratio=times["table"] / times[best],
        note=f"best of {len(times)}: {best}",
        details={"µs": times, "failed": failed, "table": base._asdict()},
    )  # fmt: skip
