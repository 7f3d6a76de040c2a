"""A Batch in, a StepOutput out, in torch's own operations and whatever a load put in their place.

Everything about a row stands in the row. An exception in a step leaves the cache usable: slots of
tokens that were not reported back are written again.

A step is launched, then waited for. On a GPU its tokens stay there as the next step's inputs, so
that one can be launched before :meth:`PendingStep.wait` has brought them to the host.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from jitney.errors import DeviceLostError
from jitney.execution.attention import AttentionMetadata, BlockTables, build_metadata
from jitney.execution.draft import DraftModel
from jitney.execution.interface import LayerCache, LoadedModel, PagedStep
from jitney.execution.logits_processors import needs_processing
from jitney.execution.low_rank import Factors, LowRank, Site, idle_factors
from jitney.execution.machine import enter_device, synchronize, to_device
from jitney.execution.sampler import Sampled, Samples, prompt_logprobs, sample
from jitney.messages import Batch, Logprob, ModelInfo, Row, RowOutput, StepOutput

# Logits of one pass. A step with more prompt logprobs than that is computed several times.
_LOGITS_FLOATS = 1 << 28
# Logits that are sampled at once. Bounds the sampler's memory; how a step is cut changes no token.
_SAMPLED_FLOATS = 1 << 24

Forward = Callable[[Tensor, AttentionMetadata, Tensor], Tensor]
"""(ids [T], the step, indices of tokens, at least one) -> their logits [len(indices), V], which the
next call may overwrite."""
_PromptLogprobs = dict[int, list[list[Logprob]]]
"""Index of a row -> of each position, its candidates."""


@dataclass(frozen=True, slots=True)
class _Targets:
    """The tokens of a row's prompt whose logprobs are asked for."""

    first: int
    """Which of the step's chosen tokens predicts the first of them; the others follow."""
    token_ids: list[int]
    count: int
    """How many candidates each position has: ``prompt_logprobs``."""


@dataclass(frozen=True, slots=True)
class _Chosen:
    """The tokens of a step that need logits."""

    tokens: list[int]
    """Their indices among the step's T tokens, ascending."""
    of_samples: list[int]
    """For each sequence to sample, in order: which of ``tokens`` it is sampled from."""
    targets: dict[int, _Targets]
    """By the row's index, of rows with prompt logprobs."""


@dataclass(slots=True)
class PendingStep:
    """A step in flight: a ``protocols.LaunchedStep``."""

    rows: list[Row]
    samples: list[Samples]
    prompt: _PromptLogprobs
    recover: Callable[[], None]
    output: StepOutput | None = None
    """Set if it is known."""

    def outputs(self) -> list[RowOutput]:
        """What :meth:`wait` gives, kept for it."""
        self.output = self.wait()
        return self.output.rows

    def wait(self) -> StepOutput:
        """The step's output, once the device has it. Raises whatever the device raises."""
        if self.output is not None:
            return self.output
        try:
            sampled = [each for samples in self.samples for each in samples.wait()]
        except BaseException:
            self.recover()
            raise
        outputs = []
        begin = 0
        for r, row in enumerate(self.rows):
            end = begin + row.num_samples
            outputs.append(_output(row, sampled[begin:end], self.prompt.get(r)))
            begin = end
        return StepOutput(rows=outputs)


class TorchRunner:
    """Owns the model, the KV cache and the device: the only thing that touches them in service.

    A ``protocols.Runner``. Not thread-safe: one thread calls it.
    """

    info: ModelInfo

    def __init__(
        self,
        model: LoadedModel,
        caches: list[LayerCache],
        info: ModelInfo,
        forward: Forward | None = None,
    ) -> None:
        """``forward``: in the place of the model's own over ``caches``."""
        self.info = info
        self._model = model
        self._device = model.device
        self._caches = caches
        self._tables = BlockTables()
        self._forward = forward or self.forward
        self._most_logits = max(1, _LOGITS_FLOATS // info.vocab_size)
        self._sampled: Tensor | None = None  # tokens of the step launched last
        self._draft: DraftModel | None = None

    def use_draft_model(self, draft: DraftModel) -> None:
        """Have it follow whatever is computed from now on, and propose what rows ask for."""
        self._draft = draft

    def execute(self, batch: Batch) -> StepOutput:
        """Compute one step: copy blocks, write the new K and V, sample.

        Raises whatever the device raises; then no row of the batch may be taken as computed.
        """
        return self.launch(batch).wait()

    def launch(self, batch: Batch) -> PendingStep:
        """Queue a step behind those before it. Returns before a GPU is done, unless a row asks for
        prompt logprobs; if it raises, MemoryError for want of the device's, nothing is in flight.
        """
        enter_device(self._device)
        with torch.inference_mode():
            try:
                return self._launch(batch)
            except BaseException as error:
                self.recover()
                if isinstance(error, torch.OutOfMemoryError):
                    raise MemoryError(str(error)) from error
                raise

    def recover(self) -> None:
        """A step failed: wait until nothing is in flight. Raises DeviceLostError if the device does
        not even answer."""
        self._sampled = None
        try:
            synchronize(self._device)
        except Exception as fault:
            raise DeviceLostError("the device has failed for good") from fault

    def forward(self, ids: Tensor, meta: AttentionMetadata, indices: Tensor) -> Tensor:
        """A :data:`Forward`: the model's own."""
        step = PagedStep(self._caches, meta)
        return self._model.forward(ids, meta.positions, indices, step)

    def warm_up(self, batches: Sequence[Batch]) -> None:
        """Compute first steps, and again with an adapter if there may be any, so that kernels are
        compiled and memory is touched."""
        for batch in batches:
            self.execute(batch)
        if self.sites:
            adapter = self.make_adapter("", idle_factors(self.sites, 1))
            for batch in batches:
                for row in batch.rows:
                    row.adapter = adapter
                self.execute(batch)

    @property
    def sites(self) -> Mapping[str, Site]:
        """What adapters may change; empty unless option ``adapters`` is set."""
        return self._model.sites

    def make_adapter(self, version: str, factors: Mapping[str, Factors]) -> LowRank:
        """An adapter as steps take it, of factors on the CPU. Any thread may call it."""
        dtype, device = self._model.dtype, self._device
        placed = {
            path: Factors(*(each.to(device, dtype) for each in pair))
            for path, pair in factors.items()
        }
        pack = self._model.pack
        return LowRank(version, placed, None if pack is None else pack(placed))

    def close(self) -> None:
        """Give the memory of module and cache back. The runner is of no use afterwards."""
        self._caches = []
        self._sampled = None
        self._draft = None
        del self._model, self._forward
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    # ------------------------------------------------------------------ a step

    def _launch(self, batch: Batch) -> PendingStep:
        rows = list(batch.rows)
        self._copy_blocks(batch.copies)
        if not rows:
            return PendingStep([], [], {}, self.recover)
        meta = build_metadata(rows, self.info.block_size, self._device, self._tables)
        ids = to_device([token for row in rows for token in row.token_ids], self._device)
        if self.info.overlap:
            self._take_carried(rows, ids, meta)
        logits, sources, prompt = self._run(rows, ids, meta)
        samples = self._sample(rows, logits, sources)
        if self.info.overlap:
            self._sampled = torch.cat([each.token_ids for each in samples]) if samples else None
        step = PendingStep(rows, samples, prompt, self.recover)
        if self._draft is not None:
            self._draft.follow(batch, meta, step.outputs)
        return step

    def _take_carried(self, rows: list[Row], ids: Tensor, meta: AttentionMetadata) -> None:
        """Put the tokens that the step before samples into ``ids`` [T], without waiting for it."""
        carried = [(r, row.carried) for r, row in enumerate(rows) if row.carried is not None]
        if carried:
            assert self._sampled is not None, "a row takes a token of a step that is not there"
            takers, sources = to_device(carried, self._device).unbind(1)
            ids[meta.query_start[takers].long()] = self._sampled[sources]

    def _run(
        self, rows: list[Row], ids: Tensor, meta: AttentionMetadata
    ) -> tuple[Tensor, list[int], _PromptLogprobs]:
        """Logits to sample from, for each (row, sequence) the index of its own, prompt logprobs.

        In as many passes as it takes to hold the logits: each writes the same K and V again.
        """
        chosen = _choose_tokens(rows)
        tokens = to_device(chosen.tokens or [0], self._device)
        if not chosen.targets:
            return self._forward(ids, meta, tokens), chosen.of_samples, {}

        sampled = sorted(set(chosen.of_samples))
        prompt: _PromptLogprobs = {r: [] for r in chosen.targets}
        kept: list[Tensor] = []
        for begin in range(0, len(tokens), self._most_logits):
            logits = self._forward(ids, meta, tokens[begin : begin + self._most_logits])
            end = begin + len(logits)
            for r, targets in chosen.targets.items():
                prompt[r] += _logprobs_within(targets, logits, begin)
            # Copied, because the next pass may overwrite the logits.
            here = [index - begin for index in sampled if begin <= index < end]
            kept.append(logits[to_device(here, self._device)])
        row_of = {index: i for i, index in enumerate(sampled)}
        return torch.cat(kept), [row_of[index] for index in chosen.of_samples], prompt

    def _sample(self, rows: list[Row], logits: Tensor, sources: list[int]) -> list[Samples]:
        """For each (row, sequence) of the step, in order; ``sources`` index ``logits``.

        In slices: prompts of n > 1 that end in one step can give a hundred times as many sequences
        as rows, and the sampler makes several copies of its logits.
        """
        pairs = [pair for row in rows for pair in _samples_of(row)]
        size = max(1, _SAMPLED_FLOATS // logits.shape[1])
        samples = []
        for begin in range(0, len(pairs), size):
            some = sources[begin : begin + size]
            whole = slice(some[0], some[-1] + 1)  # as a rule each row of logits, once
            once = some == list(range(whole.start, whole.stop))
            part = logits[whole if once else to_device(some, self._device)]
            samples.append(sample(part, pairs[begin : begin + size]))
        return samples

    def _copy_blocks(self, copies: list[tuple[int, int]]) -> None:
        """All sources are read before any destination is written."""
        if not copies:
            return
        source, destination = to_device(copies, self._device).unbind(1)
        for keys, values, *_ in self._caches:
            for cache in (keys, values):
                if cache.itemsize == 1:  # indexing knows no 8-bit floats
                    cache = cache.view(torch.uint8)
                cache[destination] = cache[source]


def _choose_tokens(rows: list[Row]) -> _Chosen:
    """Which tokens need logits: the last of each row that samples, its drafts and the token before
    them, and those that predict a prompt whose logprobs are asked for."""
    tokens: list[int] = []
    of_samples: list[int] = []
    targets: dict[int, _Targets] = {}
    begin = 0
    for r, row in enumerate(rows):
        end = begin + len(row.token_ids)
        count = row.params.prompt_logprobs
        if count is not None:
            # The token at position p predicts prompt[p + 1].
            predicted = row.prompt[row.start + 1 : row.end + 1]
            if predicted:
                targets[r] = _Targets(len(tokens), predicted, count)
                tokens.extend(range(begin, begin + len(predicted)))
        if row.sample:
            if not tokens or tokens[-1] != end - 1:  # else prompt logprobs have the last token
                tokens.extend(range(end - 1 - row.drafts, end))
            first = len(tokens) - 1 - row.drafts
            if row.drafts:
                of_samples.extend(range(first, len(tokens)))
            else:
                of_samples.extend([first] * len(row.sample))
        begin = end
    return _Chosen(tokens, of_samples, targets)


def _logprobs_within(targets: _Targets, logits: Tensor, begin: int) -> list[list[Logprob]]:
    """The candidates of those targets that this pass predicts: ``logits`` are of the chosen tokens
    from ``begin`` on."""
    low = max(targets.first, begin)
    high = min(targets.first + len(targets.token_ids), begin + len(logits))
    if low >= high:
        return []
    token_ids = targets.token_ids[low - targets.first : high - targets.first]
    return prompt_logprobs(logits[low - begin : high - begin], token_ids, targets.count)


def _samples_of(row: Row) -> list[tuple[Row, int]]:
    """(row, sequence index) for each token that it samples. Behind a draft that is the row as it
    would be if the drafts up to there were output."""
    if not row.drafts:
        return [(row, index) for index in row.sample]
    (index,) = row.sample
    known = len(row.token_ids) - row.drafts
    drafts = row.token_ids[known:]
    reads_output = needs_processing(row)
    pairs = []
    for count in range(row.drafts + 1):
        behind = replace(row, token_ids=row.token_ids[: known + count])
        if count and reads_output:
            behind.output = row.output + drafts[:count]
            if row.grammar is not None:
                behind.grammar = row.grammar.after(drafts[:count])
        pairs.append((behind, index))
    return pairs


def _output(row: Row, samples: list[Sampled], prompt: list[list[Logprob]] | None) -> RowOutput:
    """What the row's samples make of it."""
    failed = _first_failed(samples)
    if failed is not None and row.drafts:
        # Behind a wrong draft a failure means nothing: what was sampled before it stands.
        drafts = row.token_ids[len(row.token_ids) - row.drafts :]
        before = [each.token_id for each in samples[:failed]]
        if before != drafts[:failed]:
            samples = samples[:failed]
            failed = None
    if failed is not None:
        return RowOutput([], error=samples[failed].error)

    tokens = [each.token_id for each in samples]
    logprobs = None
    if samples and row.params.logprobs is not None:
        logprobs = [each.logprobs or [] for each in samples]
    return RowOutput(tokens, logprobs, prompt)


def _first_failed(samples: list[Sampled]) -> int | None:
    """Index of the first sample without a token."""
    for index, each in enumerate(samples):
        if each.error is not None:
            return index
    return None
