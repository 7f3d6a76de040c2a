"""OpenVINO GenAI's continuous batching over a model that ``optimum-cli`` converted.

Runs in an environment that has ``openvino-genai`` and numpy; torch and Jitney are not needed.
"""

import argparse
import time

import numpy as np
import openvino
import openvino_genai

from benchmarks.engines.measure import Outcome, Run, Starts, run_engine
from benchmarks.workloads import Bounds, Workload


def load(arguments: argparse.Namespace, bounds: Bounds) -> Run:
    """The pipeline with the bounds of the workloads."""
    scheduling = openvino_genai.SchedulerConfig()
    scheduling.max_num_seqs = bounds.max_num_seqs
    scheduling.max_num_batched_tokens = bounds.max_num_batched_tokens
    scheduling.dynamic_split_fuse = True
    scheduling.enable_prefix_caching = bounds.prefix_caching is True
    scheduling.cache_size = bounds.cache_gib
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
        tokens = 0
        first = None
        starts = Starts(len(handles))
        while pipeline.has_non_finished_requests():
            pipeline.step()
            steps += 1
            started = []
            for number, handle in enumerate(handles):
                if handle.can_read():
                    tokens += sum(len(made.generated_ids) for made in handle.read().values())
                    started.append(number)
            if started:
                seconds = time.perf_counter() - began
                first = first or seconds
                starts.note(started, tokens, seconds)
        elapsed = time.perf_counter() - began
        return Outcome(
            seconds=elapsed,
            output_tokens=tokens,
            first_token_s=first,
            all_started_s=starts.all_started_s,
            tokens_then=starts.tokens_then,
            steps=steps,
        )

    return run


def options(parser: argparse.ArgumentParser) -> None:
    """The precision in which it computes; by default its own choice."""
    parser.add_argument("--precision", default="default")


if __name__ == "__main__":
    run_engine(load, options)
