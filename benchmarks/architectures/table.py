"""The page and the summary of a sweep."""

from collections import Counter
from pathlib import Path

import jitney
import transformers

from benchmarks.architectures.result import Result

_BEGIN = "<!-- begin: written by python -m benchmarks.architectures -->"
_END = "<!-- end -->"


def summary(results: list[Result]) -> str:
    """How many load, by kind; which give wrong tokens."""
    kinds = Counter(result.cache for result in results if result.loads)
    lines = [
        f"{sum(kinds.values())} of {len(results)} types load with the tokens of transformers: "
        + ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
    ]
    lines.append(f"refused: {sum(bool(result.refusal) for result in results)}")
    not_made = [result for result in results if result.not_made and not result.cache]
    lines.append(f"without a tiny checkpoint: {len(not_made)}")
    for result in results:
        if result.is_fault:
            lines.append(f"WRONG {result.model_type}: {result.fault or result.ways}")
    return "\n".join(lines)


def write_page(results: list[Result], page: Path) -> None:
    """Put the tables between the page's two marks. Raises ValueError if it lacks them."""
    text = page.read_text(encoding="utf-8")
    before, mark, rest = text.partition(_BEGIN)
    _, end, after = rest.partition(_END)
    if not mark or not end:
        raise ValueError(f"{page} lacks the marks of the generated part")
    body = "\n\n".join([_loading(results), _refused(results)])
    page.write_text(f"{before}{_BEGIN}\n\n{body}\n\n{_END}{after}", encoding="utf-8")


def _loading(results: list[Result]) -> str:
    names = {name: None for result in results for name in result.ways}  # in order, each once
    lines = [
        f"With transformers {transformers.__version__} and jitney {jitney.__version__}, ways: "
        f"{', '.join(names)}.",
        "",
        "| type | cache | tokens | not with |",
        "|---|---|---|---|",
    ]
    for result in results:
        if result.cache:
            cells = [result.model_type, result.cache, _tokens(result), _not_with(result)]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _tokens(result: Result) -> str:
    if result.is_fault:
        return "differ"
    if not result.ways:
        return "not compared: transformers alone does not generate"
    return "same"


def _not_with(result: Result) -> str:
    return ", ".join(name for name, text in result.ways.items() if text.startswith("refused"))


def _refused(results: list[Result]) -> str:
    lines = ["| type | why it does not load |", "|---|---|"]
    for result in results:
        if not result.cache:
            why = result.fault or result.refusal or result.not_made
            lines.append(f"| {result.model_type} | {why.replace('|', '/')} |")
    return "\n".join(lines)
