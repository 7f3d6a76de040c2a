"""transformers' continuous batching (what ``generate_batch`` runs), with paged ``sdpa``."""

import argparse
import time

import torch
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

from benchmarks.engines.measure import Outcome, Run, run_engine
from benchmarks.workloads import Bounds, Workload


def load(arguments: argparse.Namespace, bounds: Bounds) -> Run:
    """The model in bf16. ``generate_batch`` takes one length for all requests, so its manager is
    used, which takes one for each."""
    torch.set_num_threads(arguments.threads)
    model = AutoModelForCausalLM.from_pretrained(
        arguments.model, dtype=torch.bfloat16, attn_implementation="sdpa"
    ).eval()
    batching = ContinuousBatchingConfig(
        max_batch_tokens=bounds.max_num_batched_tokens,
        max_requests_per_batch=bounds.max_num_seqs,
        num_blocks=128,
        allow_block_sharing=False,
    )
    generation = GenerationConfig(do_sample=False, eos_token_id=-1, max_new_tokens=16)

    def run(workload: Workload) -> Outcome:
        manager = model.continuous_batching_context_manager(
            generation_config=generation, continuous_batching_config=batching
        )
        with manager as requests:
            began = time.perf_counter()
            for prompt, length in zip(workload.prompts, workload.output_lengths, strict=True):
                requests.add_request(prompt, max_new_tokens=length, eos_token_id=-1)
            tokens = done = 0
            while done < len(workload.prompts):
                result = requests.get_result(timeout=1)
                if result is not None and result.is_finished():
                    tokens += len(result.generated_tokens)
                    done += 1
                elif result is None and not requests.is_running():
                    raise RuntimeError("its thread ended before the requests did")
            return Outcome(time.perf_counter() - began, tokens)

    return run


if __name__ == "__main__":
    run_engine(load)
