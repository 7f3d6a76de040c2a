"""Between a step's rows and its logits: which tokens of a step need logits; for each sample, the
row as the sampler must see it; and the rows' outputs, made of the samples. Pure functions, called
by the runner.
"""

from dataclasses import dataclass, replace

from torch import Tensor

from jitney.batch import Row, RowOutput
from jitney.execution.filters import SampledRow
from jitney.execution.logits_processors import (
    counts_of,
    is_penalized,
    named_tokens_of,
    needs_processing,
)
from jitney.execution.sampler import SampledToken, prompt_logprobs
from jitney.messages import Logprob

RowPromptLogprobs = list[list[Logprob]]
"""For each token of a row's prompt that the step predicts: the candidates at its position."""


@dataclass(frozen=True, slots=True)
class PromptTargets:
    """The tokens of a row's prompt whose logprobs are asked for and that the step predicts."""

    token_ids: list[int]
    first: int
    """The index, in ``LogitsPlan.tokens``, of the token that predicts the first of them. The tokens
    behind it predict the others."""
    num_candidates: int
    """How many candidates each position gets: ``prompt_logprobs``."""


@dataclass(frozen=True, slots=True)
class LogitsPlan:
    """The tokens of a step that need logits."""

    tokens: list[int]
    """Their indices among the step's T flattened tokens, ascending."""
    sampled_from: list[int]
    """For each sample of the step, in order: the index, in ``tokens``, of the token from whose
    logits it is drawn. The samples of one row may share a token."""
    targets: dict[int, PromptTargets]
    """By the row's index, of rows with prompt logprobs."""


def plan_logits(rows: list[Row]) -> LogitsPlan:
    """The tokens that need logits: those that predict a prompt whose logprobs are asked for, and
    those that are sampled from. The latter are the last token of a row that samples, and with
    drafts also the token before each draft."""
    tokens: list[int] = []
    sampled_from: list[int] = []
    targets: dict[int, PromptTargets] = {}
    begin = 0
    for r, row in enumerate(rows):
        end = begin + len(row.token_ids)
        num_candidates = row.params.prompt_logprobs
        if num_candidates is not None:
            # The token at position p predicts prompt[p + 1].
            predicted = row.prompt[row.start + 1 : row.end + 1]
            if predicted:
                targets[r] = PromptTargets(predicted, len(tokens), num_candidates)
                tokens.extend(range(begin, begin + len(predicted)))
        if row.sample:
            first = len(tokens)
            tokens.extend(range(end - 1 - row.drafts, end))
            if row.drafts:
                # One sequence: a sample in place of the first draft, and one behind each draft.
                sampled_from.extend(range(first, len(tokens)))
            else:
                # All sequences of a prompt begin with the same logits.
                sampled_from.extend([first] * len(row.sample))
        begin = end
    return LogitsPlan(tokens, sampled_from, targets)


def logprobs_in_pass(targets: PromptTargets, logits: Tensor, first: int) -> RowPromptLogprobs:
    """The candidates of the targets that ``logits`` predict. The logits are of consecutive tokens
    of the plan, from the one with index ``first`` on."""
    begin = max(targets.first, first)
    end = min(targets.first + len(targets.token_ids), first + len(logits))
    if begin >= end:
        return []
    token_ids = targets.token_ids[begin - targets.first : end - targets.first]
    return prompt_logprobs(logits[begin - first : end - first], token_ids, targets.num_candidates)


def sampled_rows(row: Row) -> list[SampledRow]:
    """For each token that the row samples, the pair that the sampler takes.

    A token behind drafts is sampled as if these drafts were output. So each sample gets a copy of
    the row, whose ``token_ids`` end with the drafts before the sample. If a logits processor reads
    the copy, then ``output`` (cut to the :func:`end_of_output`), ``counts`` and ``grammar`` have
    these drafts, too.
    """
    if not row.drafts:
        return [(row, index) for index in row.sample]
    (index,) = row.sample
    num_known = len(row.token_ids) - row.drafts
    drafts = row.token_ids[num_known:]
    # Only processors look at these. Without one, they need not be copied.
    reads_output = needs_processing(row)
    end = end_of_output(row)
    counts = counts_of(row) if is_penalized(row) else None
    pairs = []
    for num_before in range(row.drafts + 1):
        as_sampled = replace(row, token_ids=row.token_ids[: num_known + num_before], drafts=0)
        if reads_output and num_before > 0:
            as_sampled.output = end + drafts[:num_before]
            if counts is not None:
                as_sampled.counts = counts.after(drafts[:num_before])
            if row.grammar is not None:
                as_sampled.grammar = row.grammar.after(drafts[:num_before])
        pairs.append((as_sampled, index))
    return pairs


def end_of_output(row: Row) -> list[int]:
    """The last tokens of a row's output, as many as the longest of its bad words has. That is all
    that the sampler reads of it, so a long output is not copied in each step."""
    if not row.bad_words_ids:
        return row.output[-1:]
    longest_word = named_tokens_of(row).bad_words.longest
    return row.output[-longest_word:]


def row_output(
    row: Row, samples: list[SampledToken], prompt_logprobs: RowPromptLogprobs | None
) -> RowOutput:
    """The row's output: its samples, or the error of the first that got no token."""
    failed = _first_failed(samples)
    if failed is not None:
        if not _is_behind_wrong_draft(row, samples, failed):
            return RowOutput([], error=samples[failed].error)
        # A wrong draft stands in front of the failed sample. Samples behind that draft do not
        # count, so all samples that count are before the failed one.
        samples = samples[:failed]

    tokens = [each.token_id for each in samples]
    logprobs = None
    if samples and row.params.logprobs is not None:
        logprobs = [each.logprobs or [] for each in samples]
    return RowOutput(tokens, logprobs, prompt_logprobs)


def _first_failed(samples: list[SampledToken]) -> int | None:
    """Index of the first sample without a token."""
    for index, each in enumerate(samples):
        if each.error is not None:
            return index
    return None


def _is_behind_wrong_draft(row: Row, samples: list[SampledToken], index: int) -> bool:
    """Whether a draft in front of this sample differs from what was sampled in its place. The
    sequence then goes on without that draft, and the sample means nothing."""
    if not row.drafts:
        return False
    drafts = row.token_ids[len(row.token_ids) - row.drafts :]
    sampled = [each.token_id for each in samples[:index]]
    return sampled != drafts[:index]
