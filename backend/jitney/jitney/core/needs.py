"""What a request may need at most, and whether an empty cache could ever hold it.

Pure arithmetic over token counts. The scheduler asks when a request is held, and when it is
submitted.
"""

import math
from dataclasses import dataclass

from jitney.config import EngineConfig
from jitney.errors import InvalidArgumentError
from jitney.messages import Submit


@dataclass(frozen=True, slots=True)
class RequestNeeds:
    """What a request needs in the worst case."""

    max_output: int
    """Output tokens of one sequence: max_tokens, or fewer where the context ends."""
    sequence_blocks: int
    """Blocks of one sequence at its longest. Its last token is never computed and needs no slot."""
    request_blocks: int
    """Blocks of all sequences that run at once. If all n can, they share the full blocks of the
    prompt, unless the model has slots. If fewer can, no block counts as shared, because a
    fork that waited may find no block of the prompt in the cache any more."""


def needs_of(
    message: Submit,
    config: EngineConfig,
    *,
    num_blocks: int,
    max_model_len: int,
    max_running: int,
    has_slots: bool = False,
) -> RequestNeeds:
    """Work out the needs. Raises InvalidArgumentError, with the numbers, if an empty cache could
    not hold the request.

    With ``eviction: preempt`` one sequence must fit, because the others can wait for it. With
    ``never`` all sequences that run at once must fit together. With slots (``has_slots``) no block
    counts as shared: a sequence whose step failed begins anew, in blocks of its own.
    """
    size = len(message.prompt)
    max_output = min(message.params.max_tokens, max_model_len - size)
    if max_output < 1:
        raise InvalidArgumentError(
            f"the prompt has {size:,} tokens, but must leave room for at least one more in a "
            f"context of {max_model_len:,}"
        )
    block_size = config.block_size
    sequence_blocks = math.ceil((size + max_output - 1) / block_size)
    n = message.params.n
    if max_output == 1:
        # All n sequences end when the prompt is computed, and nothing is forked.
        request_blocks = sequence_blocks
    elif n <= max_running:
        shared = 0 if has_slots else size // block_size
        request_blocks = shared + n * (sequence_blocks - shared)
    else:
        request_blocks = max_running * sequence_blocks
    never_evicts = config.eviction == "never"
    blocks = request_blocks if never_evicts else sequence_blocks
    if blocks > num_blocks:
        sequences = ""
        if never_evicts and n > 1:
            sequences = f" in each of n = {n} sequences"
        raise InvalidArgumentError(
            f"a prompt of {size:,} tokens with up to {max_output:,} output tokens{sequences} "
            f"needs {blocks:,} KV blocks of {block_size}, but the cache has {num_blocks:,} "
            f"({num_blocks * block_size:,} tokens)"
        )
    return RequestNeeds(
        max_output=max_output, sequence_blocks=sequence_blocks, request_blocks=request_blocks
    )
