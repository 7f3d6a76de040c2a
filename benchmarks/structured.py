"""What structured output costs: CPU time a token of W1, every request with a schema against none.

    python -m benchmarks.structured

In one process, without a server, the engine runs W1 with and without a schema in turn; which one
goes first changes from pair to pair. The schemas are of arrays that no output reaches the end of:
``strings`` and ``numbers`` leave a choice at nearly every token, ``objects`` have keys, which are
forced and computed in runs. A schema is checked and compiled before the clock starts, as it is for
every request but the first.
"""

import argparse
import itertools
import os
import statistics
import time
from collections.abc import Iterator

from jitney.engine.assemble import grammar_compiler, load_runner
from jitney.engine.engine import Engine
from jitney.read_config import make_config
from jitney.sampling_params import StructuredOutputs
from jitney.text.grammar import GrammarCompiler, prove_grammar
from jitney.text.tokenizer import read_tokenizer

from benchmarks.engines.jitney import serve
from benchmarks.served import add_engine_options, save_spelling_m100
from benchmarks.workloads import (
    MAX_NUM_BATCHED_TOKENS,
    MAX_NUM_SEQS,
    Workload,
    w1,
    warm_up,
)

PERSON = {
    "type": "object",
    "properties": {
        "identifier": {"type": "integer", "minimum": 0, "maximum": 99999},
        "confirmed": {"type": "boolean"},
        "comment": {"type": "string", "maxLength": 12},
    },
    "required": ["identifier", "confirmed", "comment"],
    "additionalProperties": False,
}
ITEMS = {"strings": {"type": "string"}, "numbers": {"type": "number"}, "objects": PERSON}


def main() -> None:
    """Run the pairs and print the table."""
    arguments = _parse()
    model = save_spelling_m100(arguments.work_dir)
    options = {
        "model": str(model.resolve()),
        "dtype": arguments.dtype,
        "threads": arguments.threads or len(os.sched_getaffinity(0)),
        "max_num_seqs": MAX_NUM_SEQS,
        "max_num_batched_tokens": MAX_NUM_BATCHED_TOKENS,
        "kv_cache_bytes": 1 << 30,
        "prefix_caching": False,  # or every run but the first would find its prompts
    }
    config = make_config(options)
    runner = load_runner(config)
    data = read_tokenizer(model)
    compile_grammar = grammar_compiler(data, runner.info)
    assert isinstance(compile_grammar, GrammarCompiler)
    engine = Engine(config, runner, compile_grammar=compile_grammar)
    workload = w1() if arguments.requests is None else w1().head(arguments.requests)
    keys = itertools.count()
    serve(engine, warm_up(), keys)
    print("| schema | CPU ms a token, with / without | ratio, median (range) | steps of both |")
    print("|---|---|---|---|")
    for name in arguments.schemas:
        schema = {"type": "array", "items": ITEMS[name], "minItems": 1000}
        asked = StructuredOutputs(json=schema)
        most = config.max_grammar_bytes, config.max_grammar_depth
        grammar = prove_grammar(asked, compile_grammar, *most)
        serve(engine, warm_up(), keys, grammar=grammar)
        _compare(name, grammar, engine, workload, keys, arguments.pairs)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--schemas", nargs="+", choices=ITEMS, default=list(ITEMS))
    parser.add_argument("--requests", type=int, help="only the first so many of W1, for a look")
    add_engine_options(parser)
    return parser.parse_args()


def _compare(
    name: str, grammar: str, engine: Engine, workload: Workload, keys: Iterator[int], pairs: int
) -> None:
    """Run the pairs of one schema and print its line."""
    spent: dict[str, list[float]] = {grammar: [], "": []}
    steps: dict[str, int | None] = {}
    for turn in range(pairs):
        for which in (grammar, "") if turn % 2 else ("", grammar):
            began = time.process_time()
            outcome = serve(engine, workload, keys, grammar=which)
            spent[which].append(time.process_time() - began)
            steps[which] = outcome.steps
            if outcome.output_tokens != workload.output_tokens:
                raise RuntimeError(f"{outcome.output_tokens} tokens came with {name}")
    ratios = [one / other for one, other in zip(spent[grammar], spent[""], strict=True)]
    with_ms, without_ms = (
        1e3 * statistics.median(spent[which]) / workload.output_tokens for which in (grammar, "")
    )
    print(
        f"| {name} | {with_ms:.2f} / {without_ms:.2f} | {statistics.median(ratios):.3f} "
        f"({min(ratios):.2f}–{max(ratios):.2f}) | {steps[grammar]} / {steps['']} |",
        flush=True,
    )


if __name__ == "__main__":
    main()
