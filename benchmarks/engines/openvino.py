"""OpenVINO GenAI's continuous batching over a model that ``optimum-cli`` converted.

Runs in an environment that has ``openvino-genai`` and numpy; torch and Jitney are not needed.
"""

import argparse
import time

import numpy as np
import openvino
import openvino_genai

from benchmarks.engines.measure import Outcome, Run, run_engine
from benchmarks.workloads import MAX_NUM_BATCHED_TOKENS, MAX_NUM_SEQS, Workload


def load(arguments: argparse.Namespace) -> Run:
    """The pipeline with the batch's bounds of the workloads."""
    scheduling = openvino_genai.SchedulerConfig()
    scheduling.max_num_seqs = MAX_NUM_SEQS
    scheduling.max_num_batched_tokens = MAX_NUM_BATCHED_TOKENS
    scheduling.dynamic_split_fuse = True
    scheduling.enable_prefix_caching = False
    scheduling.cache_size = 1  # GiB
    properties = {"INFERENCE_NUM_THREADS": arguments.threads}
    if arguments.precision != "default":
        properties["INFERENCE_PRECISION_HINT"] = arguments.precision
    pipeline = openvino_genai.ContinuousBatchingPipeline(
        arguments.model, scheduling, "CPU", properties
    )

    def run(workload: Workload) -> Outcome:
        began = time.perf_counter()
        handles = []
        pairs = zip(workload.prompts, workload.output_lengths, strict=True)
        for number, (prompt, length) in enumerate(pairs):
            generation = openvino_genai.GenerationConfig()
            generation.max_new_tokens = generation.min_new_tokens = length
            generation.ignore_eos = True
            generation.do_sample = False
            ids = openvino.Tensor(np.array([prompt], dtype=np.int64))
            handles.append(pipeline.add_request(number, ids, generation))
        steps = 0
        first = None
        while pipeline.has_non_finished_requests():
            pipeline.step()
            steps += 1
            if first is None and any(handle.can_read() for handle in handles):
                first = time.perf_counter() - began
        elapsed = time.perf_counter() - began
        outputs = [output for handle in handles for output in handle.read_all()]
        return Outcome(elapsed, sum(len(o.generated_ids) for o in outputs), first, steps)

    return run


def options(parser: argparse.ArgumentParser) -> None:
    """The precision in which it computes; by default its own choice."""
    parser.add_argument("--precision", default="default")


if __name__ == "__main__":
    run_engine(load, options)
