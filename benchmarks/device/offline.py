"""Part ``offline``: W-gpu through the engine, and beside it transformers on the same workload.

W-gpu: 512 requests that are all there at the start, prompts of 64 to 1,024 tokens and outputs of 64
to 512, uniform, greedy, the end of sequence ignored; at most 256 sequences at once.
"""

import gc
from collections.abc import Callable

import numpy as np
import torch

from benchmarks.device.environment import device_of
from benchmarks.device.peers import Rate, continuous_rate, static_rate
from benchmarks.device.serving import make_engine, serve
from benchmarks.device.shapes import LLAMA_8B, TINY, Shape, make_module
from benchmarks.device.supervise import Bench
from benchmarks.workloads import Workload

SEQUENCES = 256
STATIC_BAR = 5.0
CONTINUOUS_BAR = 1.5
# transformers' paged sdpa gathers all of K and V in every layer: fewer at once may be faster.
FEWER_SEQUENCES = 64


def w_gpu(vocab: int, requests: int = 512, scale: int = 1) -> Workload:
    """The workload; ``scale`` divides its lengths, for a rehearsal."""
    random = np.random.RandomState(4321)
    prompt_lengths = random.randint(64, 1025, requests) // scale
    output_lengths = random.randint(64, 513, requests) // scale
    prompts = [random.randint(10, vocab - 10, length).tolist() for length in prompt_lengths]
    return Workload("W-gpu", prompts, output_lengths.tolist(), "output")


def run(bench: Bench) -> None:
    """Ours first; each engine's memory is given back before the next."""
    device = device_of(bench)
    shape = TINY if bench.tiny else LLAMA_8B
    workload = w_gpu(shape.vocab, *((3, 64) if bench.tiny else ()))
    rates: dict[str, float] = {}
    bench.case("Jitney", lambda: _ours(bench, shape, device, workload, rates))
    ours = rates.get("ours")
    module = make_module(shape, device)

    def peer(name: str, measure: Callable[[], Rate], bar: float) -> None:
        rate = measure()
        bench.add(
            name, value=rate.per_second, unit="tok/s", bar=bar,
            ratio=ours / rate.per_second if ours else None, note=rate.note,
            details={"tokens": rate.tokens, "seconds": rate.seconds, "requests": rate.requests},
        )  # fmt: skip
        _release()

    # The rest of the time in three: what a run cannot end in, it gives the rate until then.
    third = max(5.0, (bench.left - 15) / 3)
    bench.case(
        "transformers generate, static batches of 32",
        lambda: peer(
            "transformers generate, static batches of 32",
            lambda: static_rate(module, workload, third),
            STATIC_BAR,
        ),
        seconds=10,
    )
    for sequences in (2,) if bench.tiny else (FEWER_SEQUENCES, SEQUENCES):
        name = f"transformers continuous batching, {sequences}"
        bench.case(
            name,
            lambda name=name, sequences=sequences: peer(  # type: ignore[misc]
                name,
                # Stopping it takes some seconds too.
                lambda: continuous_rate(
                    module, workload, sequences, lambda: min(third, bench.left - 10)
                ),
                CONTINUOUS_BAR,
            ),
            seconds=0 if bench.tiny else 25,
        )


def _ours(
    bench: Bench, shape: Shape, device: torch.device, workload: Workload, rates: dict[str, float]
) -> None:
    engine = make_engine(
        bench, shape, device,
        max_num_seqs=2 if bench.tiny else SEQUENCES,
        max_model_len=workload.max_length,
        **({} if bench.tiny else {"cuda_graphs": "load"}),
    )  # fmt: skip
    lengths = [min(4, length) for length in workload.output_lengths]
    warm_up = Workload("warm-up", workload.prompts, lengths, "output")
    serve(engine, warm_up.head(1 if bench.tiny else 300))
    served = serve(engine, workload)
    rates["ours"] = served.tokens / served.seconds
    least = _least_seconds(bench, shape, workload)
    bench.add(
        f"Jitney, {len(workload.prompts)} requests", value=rates["ours"], unit="tok/s",
        floor=served.tokens / least if least else None,
        ratio=least / served.seconds if least else None,
        note=f"{served.steps} steps in {served.seconds:.1f} s",
        details={"seconds": served.seconds, "steps": served.steps, "tokens": served.tokens},
    )  # fmt: skip
    engine.runner.close()  # type: ignore[attr-defined]
    del engine
    _release()


def _least_seconds(bench: Bench, shape: Shape, workload: Workload) -> float | None:
    """Counted: every prompt token's products at the matrix rate; then, with the batch always full,
    the weights once a step and every output token's context once, at the copy bandwidth."""
    bandwidth = bench.facts.get("bandwidth")
    rate = bench.facts.get("matrix_rate")
    if not bandwidth or not rate:
        return None
    prefill = 2 * shape.prompt_values * workload.prompt_tokens / rate
    pairs = zip(workload.prompts, workload.output_lengths, strict=True)
    contexts = sum(len(prompt) * n + n * (n + 1) // 2 for prompt, n in pairs)
    steps = workload.output_tokens / SEQUENCES
    read = steps * shape.step_values * shape.itemsize + contexts * shape.kv_bytes
    return float(prefill + read / bandwidth)


def _release() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
