"""transformers' ``generate`` over static batches: each batch ends with its longest request."""

import argparse
import time

import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from benchmarks.engines.measure import Outcome, Run, run_engine
from benchmarks.workloads import Bounds, Workload


def load(arguments: argparse.Namespace, bounds: Bounds) -> Run:
    """The model as transformers loads it, in bf16 with its default attention."""
    torch.set_num_threads(arguments.threads)
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.bfloat16).eval()

    def generate(prompts: list[list[int]], new: int) -> None:
        longest = max(map(len, prompts))
        ids = torch.zeros(len(prompts), longest, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):  # padded on the left
            ids[row, longest - len(prompt) :] = torch.tensor(prompt)
            mask[row, longest - len(prompt) :] = 1
        config = GenerationConfig(
            max_new_tokens=new, min_new_tokens=new, do_sample=False, pad_token_id=0
        )
        output = model.generate(ids, attention_mask=mask, generation_config=config)
        assert output.shape[1] == longest + new

    def run(workload: Workload) -> Outcome:
        first = None
        if workload.figure == "decode":  # generate gives no times: the first token alone, before
            began = time.perf_counter()
            generate(workload.prompts, 1)
            first = time.perf_counter() - began
        began = time.perf_counter()
        for at in range(0, len(workload.prompts), bounds.max_num_seqs):
            part = slice(at, at + bounds.max_num_seqs)
            generate(workload.prompts[part], max(workload.output_lengths[part]))
        return Outcome(time.perf_counter() - began, workload.output_tokens, first)

    return run


if __name__ == "__main__":
    run_engine(load)
