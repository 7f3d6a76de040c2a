"""A draft model: a second checkpoint of the same vocabulary, which proposes tokens for the first.

Its K and V stand under the same block numbers as the model's, in caches of its own. It computes
nothing before a row asks for a proposal: then what it has not yet of that row's tokens, and further
passes for the proposal. So it costs what is asked of it, and what blocks have in common is computed
once. Part of the runner.

A head (``eagle``) is one that reads, at each position, the model's hidden state there and the token
behind it. So its entries are one fewer than the tokens that are known.
"""

from collections.abc import Callable
from dataclasses import replace

import msgspec
from torch import Tensor

from jitney.execution.attention import AttentionMetadata, BlockTables, build_metadata
from jitney.execution.eagle import HeadInputs
from jitney.execution.interface import HiddenStates, LayerCache, LoadedModel, PagedStep
from jitney.execution.machine import to_device
from jitney.execution.sampler import sample
from jitney.messages import Batch, Row, RowOutput

_Asked = list[tuple[Row, RowOutput]]


class DraftModel:
    """Owns the module and its caches."""

    def __init__(
        self,
        model: LoadedModel,
        caches: list[LayerCache],
        block_size: int,
        head: HeadInputs | None = None,
    ) -> None:
        """``head``: it is one, and this gives it the model's hidden states."""
        self._caches = caches
        self._model = model
        self._block_size = block_size
        self._head = head
        self._shift = int(head is not None)
        """Entries are so many fewer than the tokens that are known."""
        self._tables = BlockTables()
        self._filled = [0] * caches[0].keys.shape[0]
        """By block: its leading slots whose K and V are of the tokens that the model's are of."""

    @property
    def reads(self) -> HiddenStates | None:
        """Where the model is to keep its hidden states."""
        return None if self._head is None else self._head.states

    def follow(
        self, batch: Batch, meta: AttentionMetadata, outputs: Callable[[], list[RowOutput]]
    ) -> None:
        """A step was launched: set the proposals of the rows that ask for one, and how many tokens
        were read before. ``outputs`` waits for the step."""
        self._take_over(batch)
        if self._head is not None:
            self._head.keep(batch.copies, meta)
        if not any(row.propose for row in batch.rows):  # else the host must know the samples
            return
        asked: _Asked = []
        for row, output in zip(batch.rows, outputs(), strict=True):
            if row.propose and output.token_ids:
                known = self._unread(newest(row, output))
                output.read = min(len(known.token_ids), row.most_read)
                output.unread = len(known.token_ids) - output.read
                if output.read:
                    del known.token_ids[output.read :]
                    # In the place of the newest token, a grammar may force another one.
                    forced = row.grammar is not None and not output.unread
                    self._fill(known, known.end - forced)
                    asked.append((known, output))
        states = None
        try:
            while asked:
                asked, states = self._propose(asked, states)
        except BaseException:
            self._filled = [0] * len(self._filled)
            raise

    def _propose(self, asked: _Asked, states: Tensor | None) -> tuple[_Asked, Tensor | None]:
        """Compute these rows, and add a token to the proposals of those that end with their last
        known one. ``states`` [T, hidden size] are those that a head has predicted for them. Returns
        the rows of these tokens, where more are wanted, and the states for them."""
        rows, device = [row for row, _ in asked], self._model.device
        meta = build_metadata(rows, self._block_size, device, self._tables)
        ids = to_device([token for row in rows for token in row.token_ids], device)
        known = [len(row.prompt) + len(row.output) - self._shift for row in rows]
        ready = [i for i, row in enumerate(rows) if row.end == known[i]]
        indices = meta.query_start[1:][to_device(ready or [0], device)].long() - 1
        hidden = None
        if self._head is not None:
            hidden = self._head.enter(self._head.of(meta) if states is None else states)
        step = PagedStep(self._caches, meta, hidden)
        logits = self._model.forward(ids, meta.positions, indices, step)
        further, goes_on = list[tuple[Row, RowOutput]](), []
        # By the same numbers as the model's: from like distributions they choose alike.
        drawn = [replace(rows[i], start=rows[i].start + self._shift) for i in ready]
        made = sample(logits, [(row, row.sample[0]) for row in drawn]).wait() if ready else []
        for i, each, index in zip(ready, made, indices.tolist(), strict=False):
            row, output = asked[i]
            if each.error is None:
                output.proposal.append(each.token_id)
                if len(output.proposal) < row.propose:
                    further.append((behind(row, each.token_id), output))
                    goes_on.append(index)
        kept = None if hidden is None else hidden.kept
        return further, None if kept is None else kept[to_device(goes_on, device)]

    def _take_over(self, batch: Batch) -> None:
        """Of a block that was copied, or begun anew, nothing is computed: a copy goes on by another
        token. Elsewhere a row goes on behind what is filled, or with the token that was read there.
        """
        for _, destination in batch.copies:
            self._filled[destination] = 0
        size = self._block_size
        for row in batch.rows:
            if row.grammar is not None:  # it may have forced what was not sampled
                number, offset = divmod(max(row.start - self._shift, 0), size)
                block = row.block_table[number]
                self._filled[block] = min(self._filled[block], offset)
            for block in row.block_table[-(-row.start // size) : -(-row.end // size)]:
                self._filled[block] = 0

    def _unread(self, row: Row) -> Row:
        """The row of all tokens, up to its own, that are not computed."""
        size, table, shift = self._block_size, row.block_table, self._shift
        start = row.start - shift
        for number in range(start // size + 1):
            if self._filled[table[number]] < size:
                start = min(number * size + self._filled[table[number]], start)
                break
        tokens = (row.prompt + row.output)[start + shift : row.end]
        return replace(row, token_ids=tokens, start=start)

    def _fill(self, row: Row, end: int) -> None:
        """From now on its tokens below ``end`` count as computed, for further rows of the same pass
        too."""
        size = self._block_size
        for number in range(row.start // size, (end - 1) // size + 1):
            self._filled[row.block_table[number]] = min(end - number * size, size)


def newest(row: Row, output: RowOutput) -> Row:
    """The row of the sample behind the drafts that equal their samples. Nothing but the choice
    counts: neither its grammar nor its logprobs; and adapters are the model's alone."""
    known, accepted = len(row.token_ids) - row.drafts, 0
    drafts = row.token_ids[known:]
    while drafts[accepted : accepted + 1] == output.token_ids[accepted : accepted + 1]:
        accepted += 1
    params = msgspec.structs.replace(row.params, logprobs=None)
    before = replace(
        row,
        params=params,
        grammar=None,
        adapter=None,
        drafts=0,
        output=row.output + drafts[:accepted],
    )
    before.token_ids = row.token_ids[: known + accepted]
    return behind(before, output.token_ids[accepted])


def behind(row: Row, token: int) -> Row:
    return replace(row, token_ids=[token], start=row.end, output=[*row.output, token])
