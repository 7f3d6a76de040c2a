"""llama.cpp through its C functions as ``llama-cpp-python`` has them, over a file of ``to_gguf``.

Runs in an environment that has ``llama-cpp-python`` and numpy; torch and Jitney are not needed.
All settings but the context and the threads are llama.cpp's own. The binding has no scheduler, so
requests run one after the other: W1, which is about batching, is not for it.
"""

import argparse
import os
import time
from collections.abc import Iterator

import llama_cpp
import numpy as np

from benchmarks.engines.measure import Outcome, Run, run_engine
from benchmarks.workloads import Bounds, Workload

CONTEXT = 4096


class Stream:
    """A loaded model and the context of one sequence."""

    def __init__(self, model: str, threads: int) -> None:
        """Raises RuntimeError if llama.cpp cannot load the file ``model``."""
        llama_cpp.llama_backend_init()
        settings = llama_cpp.llama_context_default_params()
        settings.n_ctx = CONTEXT
        settings.n_threads = settings.n_threads_batch = threads
        loaded = llama_cpp.llama_model_load_from_file(
            os.fsencode(model), llama_cpp.llama_model_default_params()
        )
        if not loaded:
            raise RuntimeError(f"llama.cpp cannot load {model}")
        self.context = llama_cpp.llama_init_from_model(loaded, settings)
        self.vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(loaded))

    def generate(self, prompt: list[int], length: int) -> Iterator[int]:
        """``length`` greedy tokens after ``prompt``, each as soon as it is known."""
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self.context), True)
        ids = prompt
        for _ in range(length):
            ids = [self._next(ids)]
            yield ids[0]

    def _next(self, ids: list[int]) -> int:
        """Append ``ids`` to the sequence; returns the token with the largest logit."""
        tokens = (llama_cpp.llama_token * len(ids))(*ids)
        status = llama_cpp.llama_decode(
            self.context, llama_cpp.llama_batch_get_one(tokens, len(ids))
        )
        if status:
            raise RuntimeError(f"llama_decode returned {status}")
        logits = llama_cpp.llama_get_logits_ith(self.context, -1)
        return int(np.ctypeslib.as_array(logits, shape=(self.vocab_size,)).argmax())


def load(arguments: argparse.Namespace, bounds: Bounds) -> Run:
    """Load the file ``arguments.model``. Nothing is bounded: it has one stream."""
    stream = Stream(arguments.model, arguments.threads)

    def run(workload: Workload) -> Outcome:
        began = time.perf_counter()
        first = None
        tokens = 0
        for prompt, length in zip(workload.prompts, workload.output_lengths, strict=True):
            for _ in stream.generate(prompt, length):
                first = first or time.perf_counter() - began
                tokens += 1
        return Outcome(time.perf_counter() - began, tokens, first)

    return run


if __name__ == "__main__":
    run_engine(load)
