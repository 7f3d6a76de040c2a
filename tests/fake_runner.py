"""An arithmetic stand-in for the model's runner: everything above the model runs on it in no time.

It keeps a simulated KV memory of token slots. A slot holds a token and the digest of the context up
to it, which the runner computes from the slot *before* it as found through the block table, as a
model's K and V depend on everything before. A next token is a hash of all slots read back through
the block table. So a block that is stale, shared by mistake, reused too soon or never copied
changes every token after it, and :func:`solo_stream`, which needs no memory, tells what the tokens
should have been.
"""

import hashlib
import time
from collections.abc import Callable, Sequence

from jitney.errors import InternalError
from jitney.request import Batch, Logprob, ModelInfo, Row, RowOutput, StepOutput, Submit

VOCAB_SIZE = 50
Slot = tuple[int, bytes]  # a token and the digest of the context that ends in it

_START = b"start"


def _digest(*parts: object) -> bytes:
    return hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()


def context(token_ids: Sequence[int]) -> list[Slot]:
    """The slots of a context that is computed in one piece."""
    slots: list[Slot] = []
    digest = _START
    for token in token_ids:
        digest = _digest(digest, token)
        slots.append((token, digest))
    return slots


def _pick(slots: Sequence[Slot], seed: int | None, index: int, vocab_size: int) -> int:
    return int.from_bytes(_digest(list(slots), seed, index), "little") % vocab_size


def candidates(token: int, position: int, vocab_size: int) -> list[Logprob]:
    """Invented logprobs of ``token`` at ``position``: some function of both."""
    return [Logprob(token, -1.0 - token / vocab_size - position / 1024, 1 + token)]


def solo_stream(
    submit: Submit, index: int = 0, *, max_model_len: int = 1 << 30, vocab_size: int = VOCAB_SIZE
) -> list[int]:
    """The tokens that sequence ``index`` of the request must get, whatever runs beside it."""
    params = submit.params
    most = min(params.max_tokens, max_model_len - len(submit.prompt))
    output: list[int] = []
    while len(output) < most:
        token = _pick(context(submit.prompt + output), params.seed, index, vocab_size)
        output.append(token)
        if token in submit.stop_ids and len(output) > params.min_tokens:
            break
    return output


class FakeRunner:
    """Serves batches as the real runner does. ``choose`` may replace the hash by tokens of a test's
    own: it gets the row and the sequence index. ``faults(batch, written)`` is called before a step
    touches the memory and again after it has written, and may raise; rows of requests in
    ``bad_keys`` come back with an error. ``step_seconds`` is slept in every step."""

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        block_size: int = 4,
        max_model_len: int = 1 << 20,
        max_num_batched_tokens: int = 512,
        vocab_size: int = VOCAB_SIZE,
        choose: Callable[[Row, int], int] | None = None,
        faults: Callable[[Batch, bool], None] | None = None,
        step_seconds: float = 0.0,
    ) -> None:
        self.info = ModelInfo(
            vocab_size=vocab_size,
            max_model_len=max_model_len,
            num_blocks=num_blocks,
            block_size=block_size,
            eos_ids=frozenset(),
            dtype="float32",
            device="cpu",
            attention="fake",
            num_parameters=0,
            max_num_batched_tokens=max_num_batched_tokens,
        )
        self.memory: list[Slot | None] = [None] * (num_blocks * block_size)
        self.bad_keys: set[int] = set()
        self.batches = 0
        self._choose = choose
        self._faults = faults
        self._step_seconds = step_seconds

    def execute(self, batch: Batch) -> StepOutput:
        """Copies, then all writes, then all reads: the order of a layer on a device."""
        self.batches += 1
        if self._faults is not None:
            self._faults(batch, False)
        if self._step_seconds:
            time.sleep(self._step_seconds)
        size = self.info.block_size
        sources = [self.memory[source * size : (source + 1) * size] for source, _ in batch.copies]
        for (_, destination), slots in zip(batch.copies, sources, strict=True):
            self.memory[destination * size : (destination + 1) * size] = slots
        for row in batch.rows:
            self._write(row)
        if self._faults is not None:
            self._faults(batch, True)
        return StepOutput([self._serve(row) for row in batch.rows])

    def block(self, number: int) -> list[Slot | None]:
        """What a block holds."""
        size = self.info.block_size
        return self.memory[number * size : (number + 1) * size]

    def _slot(self, row: Row, position: int) -> int:
        size = self.info.block_size
        return row.block_table[position // size] * size + position % size

    def _write(self, row: Row) -> None:
        assert row.token_ids, "a row without tokens"
        assert row.end <= len(row.prompt) + len(row.output)
        for position, token in enumerate(row.token_ids, row.start):
            before = self.memory[self._slot(row, position - 1)] if position else (0, _START)
            digest = before[1] if before is not None else b"never written"
            self.memory[self._slot(row, position)] = (token, _digest(digest, token))

    def _serve(self, row: Row) -> RowOutput:
        if row.key in self.bad_keys:
            return RowOutput([], error=InternalError("the logits are not finite"))
        vocab_size = self.info.vocab_size
        tokens = []
        if row.sample:
            slots = [self.memory[self._slot(row, position)] for position in range(row.end)]
            for index in row.sample:
                if self._choose is not None:
                    tokens.append(self._choose(row, index))
                else:
                    tokens.append(_pick(slots, row.params.seed, index, vocab_size))  # type: ignore[arg-type]
        output = RowOutput(tokens)
        if row.params.logprobs is not None:
            output.logprobs = [candidates(token, row.end, vocab_size) for token in tokens]
        if row.params.prompt_logprobs is not None and row.start < len(row.prompt):
            last = min(row.end, len(row.prompt) - 1)
            output.prompt_logprobs = [
                candidates(row.prompt[position], position, vocab_size)
                for position in range(row.start + 1, last + 1)
            ]
        return output
