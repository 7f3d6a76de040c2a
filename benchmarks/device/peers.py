"""transformers on the same weights' shape and workload: static ``generate`` and its own continuous
batching. Either is cut off when its time is up, and gives the rate of what it made until then."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig

from benchmarks.workloads import Workload

STATIC_BATCH = 32


@dataclass
class Rate:
    """Wanted output tokens a second, and how much of the workload that is of."""

    tokens: int
    seconds: float
    requests: int
    note: str = ""

    @property
    def per_second(self) -> float:
        """The figure."""
        return self.tokens / self.seconds


def static_rate(module: Any, workload: Workload, seconds: float) -> Rate:
    """Batches of 32 in the order of arrival, each as long as its longest request. Whole batches
    only, evenly spread over the workload; as many as ``seconds`` allow, at least one.

    A batch's rows are padded on the left; what is made beyond a request's length does not count.
    """
    starts = list(range(0, len(workload.prompts), STATIC_BATCH))
    order = starts[::2] + starts[1::2]
    _generate(module, workload.prompts[:2], 2)  # kernels and handles
    tokens = requests = 0
    began = time.perf_counter()
    for number, start in enumerate(order):
        part = slice(start, start + STATIC_BATCH)
        lengths = workload.output_lengths[part]
        _generate(module, workload.prompts[part], max(lengths))
        tokens += sum(lengths)
        requests += len(lengths)
        spent = time.perf_counter() - began
        if spent * (number + 2) / (number + 1) > seconds:  # another one would not fit
            break
    done = number + 1
    note = "" if done == len(starts) else f"{done} of {len(starts)} batches"
    return Rate(tokens, time.perf_counter() - began, requests, note)


def _generate(module: Any, prompts: list[list[int]], new: int) -> None:
    longest = max(map(len, prompts))
    ids = torch.zeros(len(prompts), longest, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :] = torch.tensor(prompt)
        mask[row, longest - len(prompt) :] = 1
    config = GenerationConfig(max_new_tokens=new, do_sample=False, pad_token_id=0)
    with torch.inference_mode():
        output: Any = module.generate(
            ids.to(module.device),
            attention_mask=mask.to(module.device),
            generation_config=config,
        )
    if tuple(output.shape) != (len(prompts), longest + new):
        raise RuntimeError(f"generate gave {tuple(output.shape)}, not {(len(prompts), new)} more")


def continuous_rate(
    module: Any, workload: Workload, sequences: int, seconds: Callable[[], float]
) -> Rate:
    """What ``generate_batch`` runs, with at most ``sequences`` at once: its manager, because
    ``generate_batch`` has one length for all requests and this takes one for each.

    With flash-attn installed transformers takes that by itself; without, it is its paged ``sdpa``,
    which builds a mask of all new by all cached tokens. Tokens are counted as they come, because
    the run may be cut off. The clock starts behind its warm-up; only then is ``seconds`` asked how
    long the rest may take.
    """
    batching = ContinuousBatchingConfig(
        max_requests_per_batch=sequences,
        max_batch_tokens=max(sequences, 2048) if module.device.type == "cuda" else 64,
        num_blocks=None if module.device.type == "cuda" else 16,
        max_memory_percent=0.6,  # of what is free: masks and copies of K and V need the rest
        allow_block_sharing=False,
    )
    generation = GenerationConfig(do_sample=False, eos_token_id=-1, max_new_tokens=16)
    manager = module.init_continuous_batching(
        generation_config=generation, continuous_batching_config=batching
    )
    made: dict[str, int] = {}
    finished = 0
    try:
        manager.warmup()
        manager.start()
        limit = seconds()
        if limit < 2:
            raise RuntimeError("its warm-up took all the time")
        began = time.perf_counter()
        for prompt, length in zip(workload.prompts, workload.output_lengths, strict=True):
            manager.add_request(prompt, max_new_tokens=length, eos_token_id=-1, streaming=True)
        while finished < len(workload.prompts) and time.perf_counter() - began < limit:
            result = manager.get_result(timeout=0.1)
            if result is None:
                if not manager.is_running():
                    raise RuntimeError("its thread ended before the requests did")
                continue
            if result.error is not None:
                raise RuntimeError(str(result.error))
            made[result.request_id] = len(result.generated_tokens)
            finished += result.is_finished()
        spent = time.perf_counter() - began
    finally:
        manager.stop(block=True, timeout=20, hard_stop=True)
        manager.destroy()
    note = f"at most {sequences} at once"
    if finished < len(workload.prompts):
        note += f"; cut off with {finished} of {len(workload.prompts)} requests done"
    return Rate(sum(made.values()), spent, finished, note)
