"""What a policy of drafts keeps with a sequence, and with a request's prompt. It stands below
``policy``, because sequences and requests hold it; only ``policy.speculation`` and
``policy.drafters`` read and change it."""

from dataclasses import dataclass, field


@dataclass(slots=True, eq=False, repr=False)
class NgramIndex:
    """Where the n-grams of a text end. An n-gram belongs to the text that it ends in: one that
    begins in the prompt and ends in the output belongs to the output."""

    positions: dict[int, int] = field(default_factory=dict)
    """Hash of an n-gram -> the position after its latest occurrence. The n-gram itself is not kept,
    to save memory. If two have the same hash, a wrong draft may be proposed."""
    end: int = 0
    """The position up to which n-grams are indexed."""


@dataclass(slots=True, eq=False, repr=False)
class Drafting:
    """What is known of the drafts of one sequence."""

    compared: float = 0.0
    """How many proposed tokens were compared with the output. Older comparisons weigh less: each
    new one multiplies this by a factor below 1 (see ``policy.speculation``), and then adds 1."""
    right: float = 0.0
    """How many of these tokens were right. Older comparisons weigh less here, too, by the same
    factor. So ``right / compared`` is the part that was right."""
    proposal: list[int] = field(default_factory=list)
    """Tokens that may follow the first ``made_at`` tokens of the sequence."""
    made_at: int = 0
    """``num_tokens`` when the proposal was made."""
    num_drafts: int = 0
    """How many tokens of the proposal the step that is being planned may compute as drafts."""
    propose: int = 0
    """How many tokens a draft model is to propose in that step, for the next one."""
    no_wait_steps: int = 0
    """In so many more steps the sequence does not wait for a pending token (see
    ``DraftPolicy.waits_for_sample``). It is set when a step has no budget, blocks or seconds left
    for its drafts: it would wait in vain."""
    ngrams: NgramIndex = field(default_factory=NgramIndex)
    """Of the output. That of the prompt is ``Request.prompt_ngrams``, for all of its sequences."""
