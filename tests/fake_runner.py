"""An arithmetic stand-in for the model's runner: everything above the model runs on it in no time.

It keeps a simulated KV memory of token slots (see ``tests/fake_tokens.py``). It computes a slot's
digest from the slot *before* it as found through the block table, and a next token from all slots
read back through the block table. So a block that is stale, shared by mistake, reused too soon or
never copied changes every token after it, and :func:`tests.solo_stream.solo_stream`, which needs no
memory, tells what the tokens should have been.

With ``overlap`` it is a device beside the host as well: steps are launched, run later and in order,
with block tables and known tokens as they were at the launch, and carried tokens out of the step
before. What a device would not notice, or not always, it notes in ``violations``.

With ``num_slots`` it keeps in each slot what a sequence has computed, as a state does: a row
appends to it, wherever the row says that it begins. So a slot that is not emptied, is shared, or is
ahead of its tokens after a failed step changes every token after it. An ``opaque`` model has
nothing else: no block is ever written or read.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from jitney.batch import Batch, Row, RowOutput, StepOutput
from jitney.errors import InternalError
from jitney.messages import Chunking, ModelInfo

from tests.fake_tokens import (
    VOCAB_SIZE,
    Slot,
    candidates,
    digest_of,
    make_slot,
    next_slot,
    pick,
    reads_output,
    start_digest,
)


class FakeStep:
    """A step in flight, and what came of it once the device has run it."""

    def __init__(self, runner: "FakeRunner", batch: Batch, before: "FakeStep | None") -> None:
        self.batch = batch
        self.before = before
        self.output: StepOutput | None = None
        self.error: Exception | None = None
        self._runner = runner

    @property
    def is_over(self) -> bool:
        """Whether the device has run it."""
        return self.output is not None or self.error is not None

    def wait(self) -> StepOutput:
        """See ``LaunchedStep``."""
        return self._runner.wait_for(self)

    def samples(self) -> list[tuple[tuple[int, int], int]]:
        """((key, index), token) of every sample, in order; zeros for a step or row that failed."""
        made: list[tuple[tuple[int, int], int]] = []
        for at, row in enumerate(self.batch.rows):
            tokens = self.output.rows[at].token_ids if self.output is not None else []
            tokens = tokens or [0] * row.num_samples
            indices = row.sample * row.num_samples if row.drafts else row.sample
            made += [
                ((row.key, index), token) for index, token in zip(indices, tokens, strict=True)
            ]
        return made


class FakeRunner:
    """A ``protocols.Runner`` that serves batches as the real one does.

    ``choose`` may replace the hash by tokens of a test's own: it gets the row and the sequence
    index. ``faults(batch, written)`` is called before a step touches the memory and again after it
    has written, and may raise. Rows of requests in ``bad_keys`` come back with an error.
    ``step_seconds`` is slept in every step.

    With ``overlap``, ``launch_faults(batch)`` may raise at a launch, and ``device()`` is asked now
    and then whether the device runs one more step by now; else it does so when waited for.
    """

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
        overlap: bool = False,
        launch_faults: Callable[[Batch], None] | None = None,
        device: Callable[[], bool] | None = None,
        num_slots: int = 0,
        num_snapshots: int = 0,
        cache: str = "paged",
        chunking: Chunking = "any",
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
            overlap=overlap,
            num_slots=num_slots,
            num_snapshots=num_snapshots,
            cache=cache,
            chunking=chunking,
        )
        self.slots: list[list[Slot]] = [[] for _ in range(num_slots + num_snapshots)]
        """What each slot holds: the past of its sequence, or a snapshot of one."""
        self._is_dropped = False
        """Whether the step before the one that runs has failed: nobody will use what this gives."""
        self.memory: list[Slot | None] = [None] * (num_blocks * block_size)
        self.bad_keys: set[int] = set()
        self.batches = 0
        self.in_flight: list[FakeStep] = []
        """Launched and not yet waited for, the oldest first."""
        self.violations: list[str] = []
        """What was asked of the runner that must never be: tests assert that there is none."""
        self._choose = choose
        self.faults = faults
        self._step_seconds = step_seconds
        self._launch_faults = launch_faults
        self._device = device
        self.foresee: Callable[[Row, int], list[int]] = lambda row, made: []
        """What a draft model proposes for a row, behind so many tokens of output."""
        self._read: dict[tuple[int, int], int] = {}  # tokens of a sequence that it has read

    # ------------------------------------------------------------------ one step

    def execute(self, batch: Batch) -> StepOutput:
        """A whole step, for tests that have no engine."""
        return self.launch(batch).wait()

    def _execute(self, batch: Batch) -> StepOutput:
        """Copies, then all writes, then all reads: the order of a layer on a device."""
        self.batches += 1
        if self.faults is not None:
            self.faults(batch, False)
        if self._step_seconds:
            time.sleep(self._step_seconds)
        size = self.info.block_size
        sources = [self.memory[source * size : (source + 1) * size] for source, _ in batch.copies]
        for (_, destination), slots in zip(batch.copies, sources, strict=True):
            self.memory[destination * size : (destination + 1) * size] = slots
        for slot in batch.released_slots:
            self.slots[slot] = []
        states = [self.slots[source].copy() for source, _ in batch.slot_copies]
        for (_, destination), state in zip(batch.slot_copies, states, strict=True):
            self.slots[destination] = state
        for row in batch.rows:
            if row.slot is not None:
                self._advance(row, len(batch.rows))
            if self.info.cache != "opaque":
                self._write(row)
        for source, destination in batch.snapshots:
            self.slots[destination] = self.slots[source].copy()
        if self.faults is not None:
            self.faults(batch, True)
        outputs = [self._serve(row) for row in batch.rows]
        for row, output in zip(batch.rows, outputs, strict=True):
            if row.propose and output.error is None:
                self._propose(row, output)
        return StepOutput(outputs)

    def _propose(self, row: Row, output: RowOutput) -> None:
        num_slots = len(row.block_table) * self.info.block_size
        self._check(row.end + row.propose <= num_slots, "no slots for what is proposed")
        known = len(row.token_ids) - row.drafts
        drafts = row.token_ids[known:]
        accepted = 0
        while accepted < row.drafts and drafts[accepted] == output.token_ids[accepted]:
            accepted += 1
        size = row.end - row.drafts + accepted + 1
        sequence = (row.key, row.index)
        unread = size - self._read.get(sequence, 0)
        self._check(row.most_read > 0, "it may read nothing")
        output.read = min(unread, row.most_read)
        output.unread = unread - output.read
        self._read[sequence] = size - output.unread
        if not output.unread:
            output.proposal = self.foresee(row, size - len(row.prompt))[: row.propose]

    def _check(self, holds: bool, otherwise: str) -> None:
        if not holds:
            self.violations.append(otherwise)

    # ------------------------------------------------------------------ steps in flight

    def launch(self, batch: Batch) -> FakeStep:
        """With overlap, note the step as it is now; the device runs it later. Else compute it."""
        if not self.info.overlap:
            return self._launch_whole(batch)
        self._get_on()
        if self._launch_faults is not None:
            self._launch_faults(batch)
        self._check(len(self.in_flight) < 2, "a third step is launched")
        rows = [
            replace(
                row,
                token_ids=row.token_ids.copy(),
                block_table=row.block_table.copy(),
                output=row.output.copy(),
            )
            for row in batch.rows
        ]
        taken = replace(
            batch, rows=rows, copies=batch.copies.copy(), slot_copies=batch.slot_copies.copy()
        )
        for other in self.in_flight:
            self._check_apart(other.batch, taken)
        before = self.in_flight[-1] if self.in_flight else None
        step = FakeStep(self, taken, before)
        self.in_flight.append(step)
        self._get_on()
        return step

    def _launch_whole(self, batch: Batch) -> FakeStep:
        self._check(not self.in_flight, "a step is launched while another is in flight")
        carried = [row for row in batch.rows if row.carried is not None]
        self._check(not carried, "a token is carried from nobody")
        step = FakeStep(self, batch, None)
        step.output = self._execute(batch)
        self.in_flight.append(step)
        return step

    def wait_for(self, step: FakeStep) -> StepOutput:
        """Run whatever was launched up to this step. Later ones run by now, or later."""
        self._check(self.in_flight[:1] == [step], "it is not the oldest step that is waited for")
        while not step.is_over:
            self._run_one()
        self._get_on()
        self.in_flight.remove(step)
        step.before = None
        if step.error is not None:
            raise step.error
        assert step.output is not None
        return step.output

    def _get_on(self) -> None:
        while self._device is not None and self._device() and self._run_one():
            pass

    def _run_one(self) -> bool:
        """Run the oldest step that has not been run. False if there is none."""
        for step in self.in_flight:
            if not step.is_over:
                self._run(step)
                return True
        return False

    def _run(self, step: FakeStep) -> None:
        samples = step.before.samples() if step.before is not None else []
        for row in step.batch.rows:
            if row.carried is None:
                continue
            owner, token = samples[row.carried] if row.carried < len(samples) else (None, 0)
            self._check(owner == (row.key, row.index), "the token of another row is carried")
            self._check(row.token_ids == [0], "a carried token is given as well")
            row.token_ids = [token]
            row.output.append(token)
        self._is_dropped = step.before is not None and step.before.error is not None
        try:
            step.output = self._execute(step.batch)
        except Exception as error:
            step.error = error

    def _check_apart(self, first: Batch, second: Batch) -> None:
        """What one step in flight writes, nobody else touches in the other. The block of a copy is
        begun by the copy: a sequence that begins it anew got it too soon."""
        copied = {block for copy in first.copies for block in copy}
        for one, writes, reads in self._blocks(second):
            for other, their_writes, their_reads in self._blocks(first):
                if one != other:
                    shared = (writes & (their_writes | their_reads)) | (reads & their_writes)
                    self._check(not shared, f"steps in flight share the blocks {sorted(shared)}")
        used = {row.slot for row in first.rows} & set(second.released_slots)
        self._check(not used, "a slot is released that a step in flight uses")
        used = {row.slot for row in first.rows}
        for source, destination in first.slot_copies + first.snapshots:
            used |= {source, destination}
        written = {destination for _, destination in second.slot_copies + second.snapshots}
        self._check(not used & written, "a slot is copied to that a step in flight uses")
        for row in second.rows:
            for other in first.rows:
                same = (row.key, row.index) == (other.key, other.index)
                shared = row.slot is not None and row.slot == other.slot
                self._check(same or not shared, "steps in flight share a slot")
            copied_slots = {slot for copy in first.slot_copies for slot in copy}
            is_new = row.start == 0 and row.slot in copied_slots
            self._check(not is_new, "a slot is handed out that a step in flight copies")
            size = self.info.block_size
            begun = {row.block_table[p // size] for p in range(row.start, row.end) if p % size == 0}
            self._check(not begun & copied, "a block is handed out that a step in flight copies")

    def _blocks(self, batch: Batch) -> list[tuple[tuple[int, int], set[int], set[int]]]:
        """Of each row: whose it is, the blocks it writes, the blocks it reads."""
        size = self.info.block_size
        found = []
        for row in batch.rows:
            used = row.block_table[: -(-(row.end + row.propose) // size)]
            found.append(((row.key, row.index), set(used[row.start // size :]), set(used)))
        return found

    # ------------------------------------------------------------------ memory

    def block(self, number: int) -> list[Slot | None]:
        """What a block holds."""
        size = self.info.block_size
        return self.memory[number * size : (number + 1) * size]

    def _slot(self, row: Row, position: int) -> int:
        size = self.info.block_size
        return row.block_table[position // size] * size + position % size

    def _write(self, row: Row) -> None:
        assert row.token_ids, "a row without tokens"
        assert row.end - row.drafts <= len(row.prompt) + len(row.output)
        for position, token in enumerate(row.token_ids, row.start):
            before = self._digest_before(row, position)
            self.memory[self._slot(row, position)] = make_slot(before, token)

    def _advance(self, row: Row, num_rows: int) -> None:
        """Append a row's tokens to what its slot holds."""
        assert row.slot is not None
        if self.info.chunking == "whole":
            is_prompt = row.start == 0 and row.end == len(row.prompt) and num_rows == 1
            is_single = row.start >= len(row.prompt) and len(row.token_ids) == 1
            self._check(is_prompt or is_single, "a prompt is cut, or not alone")
        self._check(row.drafts == 0, "drafts of a sequence with a slot")
        state = self.slots[row.slot]
        if row.start == 0:
            state.clear()
        for token in row.token_ids:
            adapter = None if row.adapter is None else row.adapter.version
            state.append(next_slot(state, token, adapter))

    def _past(self, row: Row) -> list[Slot | None]:
        """What the row computes with: the slots of blocks of all its positions, or what the slot of
        its sequence holds."""
        if row.slot is None:
            return [self.memory[self._slot(row, position)] for position in range(row.end)]
        if self.info.cache != "opaque":  # a hybrid: its blocks and its slot say the same
            blocks = [self.memory[self._slot(row, position)] for position in range(row.end)]
            agree = blocks == self.slots[row.slot]
            self._check(agree or self._is_dropped, "a slot is not at the row's position")
        return list(self.slots[row.slot])

    def _digest_before(self, row: Row, position: int) -> bytes:
        """The digest of the context in front of ``position``, as the memory has it."""
        if position == 0:
            return start_digest(None if row.adapter is None else row.adapter.version)
        return digest_of(self.memory[self._slot(row, position - 1)])

    def _serve(self, row: Row) -> RowOutput:
        if row.key in self.bad_keys:
            return RowOutput([], error=InternalError("the logits are not finite"))
        if row.drafts:
            return self._serve_drafts(row)
        vocab_size = self.info.vocab_size
        tokens = []
        if row.sample:
            slots = self._past(row)
            history = self._history(row)
            allowed: Sequence[int] = range(vocab_size)
            if row.grammar is not None:
                self._check(row.carried is None, "a row with a grammar carries its last token")
                allowed = _allowed_ids(row.grammar.mask())
            for index in row.sample:
                if self._choose is not None:
                    tokens.append(self._choose(row, index))
                else:
                    picked = pick(slots, row.params, index, history)
                    tokens.append(allowed[picked % len(allowed)])
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

    def _serve_drafts(self, row: Row) -> RowOutput:
        """What as many rows without drafts would give, each after one draft more."""
        self._check(row.carried is None, "a row with drafts carries its last token")
        self._check(row.end < len(row.prompt) + row.params.max_tokens, "drafts beyond the end")
        known = len(row.token_ids) - row.drafts
        asked = row.params.logprobs is not None
        made = RowOutput([])
        for count in range(row.drafts + 1):
            drafts = row.token_ids[known : known + count]
            self._check(not row.stop_ids.intersection(drafts), "a draft ends the sequence")
            grammar = row.grammar and row.grammar.after(drafts)
            self._check(grammar is None or not grammar.ended, "a draft completes the output")
            behind = replace(
                row,
                token_ids=row.token_ids[: known + count],
                output=row.output + drafts,
                grammar=grammar,
                drafts=0,
            )
            each = self._serve(behind)
            made.token_ids += each.token_ids
            if asked:
                made.logprobs = (made.logprobs or []) + (each.logprobs or [])
        return made

    def _history(self, row: Row) -> list[int] | None:
        """The output so far, if sampling reads it: the host must have had it at the launch."""
        reads = reads_output(row.params, row.bad_words_ids)
        if reads:
            self._check(row.carried is None, "a row that needs its last token carries it")
        return sorted(row.output) if reads else None


def _allowed_ids(mask: bytes) -> list[int]:
    """The ids whose bits are set in ``batch.GrammarState.mask``."""
    bits = int.from_bytes(mask, "little")
    return [id for id in range(8 * len(mask)) if bits >> id & 1]
