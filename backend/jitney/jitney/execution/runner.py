"""A Batch in, a StepOutput out, in torch's own operations and whatever a load put in their place.

Everything about a row stands in the row. An exception in a step leaves the cache usable: slots of
tokens that were not reported back are written again.

A step is launched, then waited for. On a GPU its tokens stay there as the next step's inputs, so
that one can be launched before :meth:`PendingStep.wait` has brought them to the host.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from jitney.batch import Batch, Row, RowOutput, StepOutput
from jitney.errors import DeviceLostError
from jitney.execution.attention import AttentionMetadata, BlockTables, build_metadata
from jitney.execution.draft import DraftModel
from jitney.execution.interface import LayerCache, LoadedModel, PagedStep
from jitney.execution.logits_processors import needs_processing
from jitney.execution.low_rank import Factors, LowRank, Site, idle_factors
from jitney.execution.machine import enter_device, synchronize, to_device
from jitney.execution.sampler import Sampled, Samples, prompt_logprobs, sample
from jitney.messages import Logprob, ModelInfo

# Logits of one pass. A step with more prompt logprobs than that is computed several times.
_LOGITS_FLOATS = 1 << 28
# Logits that are sampled at once. Bounds the sampler's memory; how a step is cut changes no token.
_SAMPLED_FLOATS = 1 << 24

Forward = Callable[[Tensor, AttentionMetadata, Tensor], Tensor]
"""(ids [T], the step, indices of tokens, at least one) -> their logits [len(indices), V], which the
next call may overwrite."""
_PromptLogprobs = dict[int, list[list[Logprob]]]
"""Index of a row -> for each position that the step predicts, the candidates there."""


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
    """For each sample of the step, in order: its index in ``tokens``."""
    targets: dict[int, _Targets]
    """By the row's index, of rows with prompt logprobs."""


class _StepLogits(NamedTuple):
    """What the forward passes of a step gave."""

    logits: Tensor
    """[N, V], of the tokens that are sampled from."""
    of_samples: list[int]
    """For each sample of the step, in order: its index among the N."""
    prompt: _PromptLogprobs


@dataclass(slots=True)
class PendingStep:
    """A step in flight: a ``protocols.LaunchedStep``."""

    rows: list[Row]
    samples: list[Samples]
    """In slices: together, the samples of all rows in order."""
    prompt: _PromptLogprobs
    recover: Callable[[], None]
    """Called if the step failed; returns when nothing is in flight."""
    output: StepOutput | None = None
    """Set by :meth:`outputs`."""

    def outputs(self) -> list[RowOutput]:
        """Wait for the rows' outputs. They are kept: what the caller changes in them is in what
        :meth:`wait` returns afterwards."""
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
        """From now on, show every step to this draft model, which proposes what rows ask for."""
        self._draft = draft

    def execute(self, batch: Batch) -> StepOutput:
        """Compute one step: copy blocks, write the new K and V, sample.

        Raises whatever the device raises; then no row of the batch may be taken as computed.
        """
        return self.launch(batch).wait()

    def launch(self, batch: Batch) -> PendingStep:
        """Queue a step behind those before it. Returns before a GPU is done, unless a row asks for
        prompt logprobs or for a draft model's proposal.

        Raises MemoryError if the device has too little memory, else whatever the device raises.
        Then nothing is in flight any more.
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
        """Wait, after a step failed, until nothing is in flight. Raises DeviceLostError if the
        device cannot even do that."""
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
        """Compute these first steps, so that kernels are compiled and memory is touched. If
        requests may bring adapters, compute them once more with one: that takes other kernels."""
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
        """The linear layers that adapters may change, by path; none without option ``adapters``."""
        return self._model.sites

    def make_adapter(self, version: str, factors: Mapping[str, Factors]) -> LowRank:
        """An adapter as steps take it, of factors on the CPU. Any thread may call it."""
        dtype = self._model.dtype
        device = self._device
        placed = {
            path: Factors(a=pair.a.to(device, dtype), b=pair.b.to(device, dtype))
            for path, pair in factors.items()
        }
        packed = None
        if self._model.pack is not None:
            packed = self._model.pack(placed)
        return LowRank(version, placed, packed)

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
            self._insert_carried(rows, ids, meta)
        found = self._compute_logits(rows, ids, meta)
        samples = self._sample(rows, found)
        if self.info.overlap:
            # The next step may be launched before this one is over: its rows take tokens from here.
            self._sampled = torch.cat([each.token_ids for each in samples]) if samples else None
        step = PendingStep(rows, samples, found.prompt, self.recover)
        if self._draft is not None:
            self._draft.follow(batch, meta, step.outputs)
        return step

    def _insert_carried(self, rows: list[Row], ids: Tensor, meta: AttentionMetadata) -> None:
        """Put the tokens that rows carry over from the step before into ``ids`` [T], on the device,
        without waiting for that step."""
        carried = [(r, row.carried) for r, row in enumerate(rows) if row.carried is not None]
        if carried:
            assert self._sampled is not None, "a row takes a token of a step that is not there"
            row_indices, sample_indices = to_device(carried, self._device).unbind(1)
            first_tokens = meta.query_start[row_indices].long()  # a row that carries has no other
            ids[first_tokens] = self._sampled[sample_indices]

    def _compute_logits(self, rows: list[Row], ids: Tensor, meta: AttentionMetadata) -> _StepLogits:
        """Run the model once, or in several passes if a row asks for prompt logprobs."""
        chosen = _choose_tokens(rows)
        tokens = to_device(chosen.tokens or [0], self._device)  # a Forward wants at least one
        if not chosen.targets:
            logits = self._forward(ids, meta, tokens)
            return _StepLogits(logits, chosen.of_samples, prompt={})
        return self._run_in_passes(chosen, tokens, ids, meta)

    def _run_in_passes(
        self, chosen: _Chosen, tokens: Tensor, ids: Tensor, meta: AttentionMetadata
    ) -> _StepLogits:
        """Run the model once for every ``_most_logits`` of the chosen ``tokens``: the logits of a
        long prompt would not fit into memory. Each pass writes the same K and V again."""
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

        # Only the logits that are sampled from were kept: count again among these.
        index_among_kept = {index: i for i, index in enumerate(sampled)}
        of_samples = [index_among_kept[index] for index in chosen.of_samples]
        return _StepLogits(torch.cat(kept), of_samples, prompt)

    def _sample(self, rows: list[Row], found: _StepLogits) -> list[Samples]:
        """Sample each (row, sequence) of the step, in order.

        In slices: prompts of n > 1 that end in one step can give a hundred times as many sequences
        as rows, and the sampler makes several copies of its logits.
        """
        pairs = [pair for row in rows for pair in _samples_of(row)]
        size = max(1, _SAMPLED_FLOATS // found.logits.shape[1])
        samples = []
        for begin in range(0, len(pairs), size):
            end = begin + size
            logits = self._take_rows(found.logits, found.of_samples[begin:end])
            samples.append(sample(logits, pairs[begin:end]))
        return samples

    def _take_rows(self, logits: Tensor, indices: list[int]) -> Tensor:
        """``logits[indices]``. As a rule these are neighbours, each once: then without a copy."""
        first = indices[0]
        stop = indices[-1] + 1
        if indices == list(range(first, stop)):
            return logits[first:stop]
        return logits[to_device(indices, self._device)]

    def _copy_blocks(self, copies: list[tuple[int, int]]) -> None:
        """All sources are read before any destination is written."""
        if not copies:
            return
        source, destination = to_device(copies, self._device).unbind(1)
        for layer in self._caches:
            for cache in (layer.keys, layer.values):
                if cache.itemsize == 1:  # torch cannot index 8-bit floats, but their bytes
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
            # Prompt logprobs may have chosen the last token already.
            if not tokens or tokens[-1] != end - 1:
                tokens.extend(range(end - 1 - row.drafts, end))
            last = len(tokens) - 1
            if row.drafts:
                of_samples.extend(range(last - row.drafts, last + 1))
            else:
                of_samples.extend([last] * len(row.sample))
        begin = end
    return _Chosen(tokens, of_samples, targets)


def _logprobs_within(targets: _Targets, logits: Tensor, begin: int) -> list[list[Logprob]]:
    """The candidates of those targets that this pass predicts. The first row of ``logits`` is that
    of the chosen token with index ``begin``."""
    low = max(targets.first, begin)
    high = min(targets.first + len(targets.token_ids), begin + len(logits))
    if low >= high:
        return []
    token_ids = targets.token_ids[low - targets.first : high - targets.first]
    return prompt_logprobs(logits[low - begin : high - begin], token_ids, targets.count)


def _samples_of(row: Row) -> list[tuple[Row, int]]:
    """(row, sequence index) for each token that the row samples.

    A token behind drafts is sampled as if these drafts were output. So its row is a copy that ends
    with the last of them, and has them in its output.
    """
    if not row.drafts:
        return [(row, index) for index in row.sample]
    (index,) = row.sample
    known = len(row.token_ids) - row.drafts
    drafts = row.token_ids[known:]
    reads_output = needs_processing(row)
    pairs = []
    for count in range(row.drafts + 1):  # how many of the drafts it is sampled behind
        behind = replace(row, token_ids=row.token_ids[: known + count])
        if count and reads_output:  # else nothing reads it, and the copies can be saved
            behind.output = row.output + drafts[:count]
            if row.grammar is not None:
                behind.grammar = row.grammar.after(drafts[:count])
        pairs.append((behind, index))
    return pairs


def _output(row: Row, samples: list[Sampled], prompt: list[list[Logprob]] | None) -> RowOutput:
    """The row's output: its samples, or the error of the first that failed."""
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
