"""The first steps of a loaded model, which compile kernels and touch memory. Called by the loader,
whose runner computes them before it serves anybody.
"""

import math

from jitney.batch import Batch
from jitney.execution.probe import probe_row
from jitney.messages import ModelInfo
from jitney.sampling_params import SamplingParams

_PROMPT_TOKENS = 16


def first_steps(info: ModelInfo, propose: int) -> list[Batch]:
    """Two batches: a chunk of a prompt, then a decode, after which a draft model proposes
    ``propose`` tokens. If the cache or ``max_model_len`` is too small for both: the decode alone,
    without a proposal.

    What they write into blocks is overwritten before it is ever read.
    """
    tokens_after_chunk = 1 + propose
    slots = info.num_blocks * info.block_size
    longest_chunk = min(info.max_model_len, slots) - tokens_after_chunk
    chunk_len = min(_PROMPT_TOKENS, info.max_num_batched_tokens, longest_chunk)
    chunk_len = max(0, chunk_len)

    prompt = [0] * (chunk_len + 1)  # the chunk, and the token of the decode
    context = chunk_len + tokens_after_chunk
    table = list(range(math.ceil(context / info.block_size)))
    greedy = SamplingParams(temperature=0.0, seed=0)
    slot = 0 if info.num_slots else None
    decode = probe_row(prompt, start=chunk_len, count=1, block_table=table, params=greedy)
    decode.slot = slot
    if chunk_len == 0:
        return [Batch([decode])]

    decode.propose = propose
    # Enough for the draft model to read every token in this one step.
    decode.most_read = context
    chunk = probe_row(prompt, start=0, count=chunk_len, block_table=table, params=greedy)
    chunk.slot = slot
    return [Batch([chunk]), Batch([decode])]
