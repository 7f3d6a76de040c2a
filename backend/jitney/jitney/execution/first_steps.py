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
    """Two batches: a chunk of a prompt, and a decode for which a draft model proposes ``propose``
    tokens. If both do not fit into the cache, the decode alone, without a proposal.

    What they write into blocks is overwritten before it is ever read.
    """
    decoded = 1 + propose
    slots = info.num_blocks * info.block_size
    fitting = min(info.max_model_len, slots) - decoded
    count = max(0, min(_PROMPT_TOKENS, info.max_num_batched_tokens, fitting))

    prompt = [0] * (count + 1)
    table = list(range(math.ceil((count + decoded) / info.block_size)))
    greedy = SamplingParams(temperature=0.0, seed=0)
    decode = probe_row(prompt, start=count, count=1, block_table=table, params=greedy)
    decode.propose = min(propose, count)
    decode.most_read = count + decoded  # so that the draft model reads everything at once
    if not count:
        return [Batch([decode])]
    chunk = probe_row(prompt, start=0, count=count, block_table=table, params=greedy)
    return [Batch([chunk]), Batch([decode])]
