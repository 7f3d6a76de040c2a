"""Part ``check-attention``: the kernels against dense float64 attention on this very device.

Few cases, each of which would show another kind of mistake; the many are in
tests/kernels/attention.
"""

from functools import partial

import torch
from jitney.execution.attention import AttentionMetadata

from benchmarks.device.environment import device_of
from benchmarks.device.paged import Batch, Case, distance, expected, function_of, make_batch
from benchmarks.device.supervise import Bench

F8 = torch.float8_e4m3fn
# Most of ‖out − right‖ / ‖right‖. In 16 bits weights and results are rounded; float32 products are
# exact ones, not tf32.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
_MIXED = [(0, 1), (4095, 1), (700, 300), (0, 65), (63, 1), (1, 2), (15, 17), (1000, 1)]

CASES = [
    Case("decode", [(n, 1) for n in (0, 1, 15, 16, 63, 64, 255, 256, 1023, 2047, 4095)]),
    Case("decode, one long row in parts", [(20000, 1)]),
    Case("chunk of 600 after 1,000", [(1000, 600)]),
    Case("mixed", _MIXED),
    Case("mixed f16, 28 heads", _MIXED, (28, 4, 128), torch.float16),
    Case("mixed f32, head 96", _MIXED, (4, 4, 96), torch.float32),
    Case("mixed, head 80, blocks of 64", _MIXED, (16, 2, 80), block_size=64),
    Case("mixed f32, head 256", _MIXED, (8, 2, 256), torch.float32, block_size=128),
    Case("window, sinks, head 64", _MIXED, (64, 8, 64), window=128, sinks=True),
    Case("window and soft cap, head 256", _MIXED, (8, 4, 256), window=512, softcap=30.0),
    Case("float8 cache", _MIXED, cache_dtype=F8),
    Case("float8 cache, decode", [(n, 1) for n in (5, 300, 4095)], cache_dtype=F8),
]
TINY_CASES = [
    Case("decode", [(0, 1), (40, 1)], (4, 2, 16)),
    Case("mixed f32, window, sinks, cap", [(20, 1), (5, 12)], (4, 2, 16), torch.float32,
         window=8, sinks=True, softcap=5.0),
    Case("float8 cache", [(20, 1), (3, 4)], (4, 2, 16), cache_dtype=F8),
]  # fmt: skip
# A cache of more than 2³¹ elements: 131,072 blocks of 16 tokens and 8 heads of 128 are 2³¹.
FAR = Case("offsets beyond 2³¹ elements", _MIXED, num_blocks=140_000)
SPREAD = [(900, 1), (0, 40), (2500, 1), (77, 130)]


def run(bench: Bench) -> None:
    """All cases; then what is a property of several launches."""
    device = device_of(bench)
    for case in TINY_CASES if bench.tiny else CASES:
        bench.case(case.name, partial(_against_float64, bench, case, device), seconds=12)
    bench.case("padded rows", partial(_padding, bench, device), seconds=6)
    bench.case("batch invariance", partial(_invariance, bench, device), seconds=12)
    if not bench.tiny:
        bench.case(FAR.name, partial(_far, bench, device), seconds=8)


def _against_float64(bench: Bench, case: Case, device: torch.device) -> None:
    batch = make_batch(case, device)
    before = batch.keys.clone(), batch.values.clone()
    out = batch.run(function_of(case, device))
    _report(bench, case.name, distance(out, expected(batch)), TOLERANCE[case.dtype])
    if device.type == "cpu" and case.cache_dtype == F8:
        return  # the interpreter's conversion to e4m3 halves what is rounded up to a power of two
    wrong = _wrongly_written(batch, *before)
    if wrong:
        bench.add(f"{case.name}: cache", value=wrong, ratio=wrong, bar=0, at_most=True)


def _report(bench: Bench, name: str, error: float, most: float) -> None:
    bench.add(name, value=error, unit="‖Δ‖/‖·‖", ratio=error, bar=most, at_most=True)


def _wrongly_written(batch: Batch, keys: torch.Tensor, values: torch.Tensor) -> int:
    """Elements of the cache that differ from a plain write of the new tokens."""
    case = batch.case
    size = batch.case.heads[2]
    block = batch.meta.slot_mapping // case.block_size
    offset = batch.meta.slot_mapping % case.block_size
    wrong = 0
    for old, now, new, scale in (
        (keys, batch.keys, batch.k, batch.options.get("key_scale")),
        (values, batch.values, batch.v, batch.options.get("value_scale")),
    ):
        plain = new.float() if scale is None else new.float() / scale[:, None]
        old[block, :, offset, :size] = plain.to(old.dtype)
        if old.dtype.itemsize == 1:  # a division may be rounded the other way
            differs = (old.float() - now.float()).abs() > 0.13 * old.float().abs() + 0.01
        else:
            differs = old != now
        wrong += int(differs.sum())
    return wrong


def _padding(bench: Bench, device: torch.device) -> None:
    """Rows without a context read nothing and give zeros, slot -1 writes nothing: what fills a
    graph's batch up."""
    case = TINY_CASES[0] if bench.tiny else CASES[0]
    batch = make_batch(case, device)
    batch.meta.context_len[-1] = 0
    batch.meta.slot_mapping[-1] = -1
    before = batch.keys.clone()
    out = batch.run(function_of(case, device))
    right = expected(batch)
    right[-1] = 0
    block = batch.meta.slot_mapping[:-1] // case.block_size
    offset = batch.meta.slot_mapping[:-1] % case.block_size
    before[block, :, offset] = batch.keys[block, :, offset]
    stray = int((before != batch.keys).sum())
    _report(bench, "padded rows", distance(out, right) + stray, TOLERANCE[case.dtype])


def _invariance(bench: Bench, device: torch.device) -> None:
    """With ``batch_invariant``, each row of a batch is bitwise what it is alone."""
    spans, shape = (SPREAD, (32, 8, 128)) if not bench.tiny else ([(20, 1), (3, 4)], (4, 2, 16))
    case = Case("batch invariance", spans, shape)
    batch = make_batch(case, device)
    attend = function_of(case, device, batch_invariant=True)
    together = batch.run(attend)
    differing = 0
    begin = 0
    for row, span in enumerate(spans):
        end = begin + span[1]
        alone = Batch(
            Case("alone", [span], shape), batch.q[begin:end], batch.k[begin:end],
            batch.v[begin:end], batch.keys, batch.values, _row_of(batch, row, begin, end),
            batch.options,
        )  # fmt: skip
        differing += int((alone.run(attend) != together[begin:end]).sum())
        begin = end
    bench.add("batch invariance: elements that differ", value=differing, ratio=differing, bar=0,
              at_most=True)  # fmt: skip
    _report(bench, "batch invariance", distance(together, expected(batch)), TOLERANCE[case.dtype])


def _row_of(batch: Batch, row: int, begin: int, end: int) -> AttentionMetadata:
    """The metadata of one row of a batch alone."""
    meta = batch.meta
    start, count = batch.case.spans[row]
    return AttentionMetadata(
        query_start=torch.tensor([0, count], dtype=torch.int32, device=batch.q.device),
        context_len=meta.context_len[row : row + 1],
        block_table=meta.block_table[row : row + 1],
        last_block=meta.last_block,
        slot_mapping=meta.slot_mapping[begin:end],
        positions=meta.positions[begin:end],
        block_size=meta.block_size,
        max_query_len=count,
        max_context_len=start + count,
    )


def _far(bench: Bench, device: torch.device) -> None:
    free, _ = torch.cuda.mem_get_info(device)
    needed = 2 * 2 * 140_000 * 16 * 8 * 128
    if free < needed + (4 << 30):
        bench.add(FAR.name, note=f"skipped: {free / 2**30:.0f} GiB are free")
        return
    batch = make_batch(FAR, device)
    out = batch.run(function_of(FAR, device))
    _report(bench, FAR.name, distance(out, expected(batch)), TOLERANCE[FAR.dtype])
