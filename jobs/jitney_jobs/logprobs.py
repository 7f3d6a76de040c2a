"""Log-probabilities of a row's tokens: as columns with types, and as objects for APIs.

A *position* has the candidates for one token, as docs/contract.md has them: {token id: {logprob,
rank, decoded_token}}, the chosen one first. A server sends them; of an engine in this process,
:class:`Positions` makes them. The gateway's forms of OpenAI's API take them as they are.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jitney.messages import Logprob
from jitney.text.logprobs import LogprobsEncoder, TokenTexts

from jitney_jobs.arrow import pa
from jitney_jobs.job import Job

COLUMNS = ("logprobs", "prompt_logprobs")
"""Sampling parameters, and the columns that they ask for: of the output's tokens, and of the
prompt's."""
Position = Mapping[Any, Mapping[str, Any]]
_CANDIDATE = {
    "token_id": pa.int64(),
    "token": pa.string(),
    "logprob": pa.float64(),
    "rank": pa.int64(),
}
COLUMN_TYPE = pa.list_(pa.struct({**_CANDIDATE, "top": pa.list_(pa.struct(_CANDIDATE))}))
"""Each token of the text, and all candidates for its position, the best one first. ``rank`` counts
from 1 over the whole vocabulary. A prompt's first token, which nothing precedes, is null."""


def logprob_columns(job: Job) -> dict[str, pa.DataType]:
    """Those that the job's parameters ask for, for all rows or by a column."""
    return {
        name: COLUMN_TYPE
        for name in COLUMNS
        if job.sampling.get(name) is not None or name in job.sampling_column
    }


class Positions:
    """Makes positions of an engine's candidates. It keeps the texts of tokens."""

    def __init__(self, tokenizer: TokenTexts) -> None:
        self._encoder = LogprobsEncoder(tokenizer)

    def of(self, tokens: Iterable[Sequence[Logprob] | None]) -> list[Position | None]:
        """One for each token; None where there are no candidates."""
        positions: list[Position | None] = []
        for candidates in tokens:
            positions.append(None if candidates is None else self._encoder.describe(candidates))
        return positions


def column_value(positions: Iterable[Position | None] | None) -> list[Any] | None:
    """A value of the column: see ``COLUMN_TYPE``."""
    if positions is None:
        return None
    return [None if position is None else _token(position) for position in positions]


def _token(position: Position) -> dict[str, Any]:
    candidates = []
    for token_id, candidate in position.items():
        candidates.append(
            {
                "token_id": int(token_id),
                "token": candidate["decoded_token"],
                "logprob": candidate["logprob"],
                "rank": candidate["rank"],
            }
        )
    best_first = sorted(candidates, key=lambda candidate: candidate["rank"])
    return {**candidates[0], "top": best_first}
