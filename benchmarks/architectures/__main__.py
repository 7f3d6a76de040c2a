"""Which architectures load, by which kind of cache, with the tokens of transformers?

    python -m benchmarks.architectures                       # all types, some minutes
    python -m benchmarks.architectures --types llama mamba
    python -m benchmarks.architectures --write docs/architectures.md

Every type that transformers lists as a causal language model gets a tiny random checkpoint (one
that has eyes or ears: towers included). Its greedy tokens are compared with those of ``generate``
in each of the ways of ``ways.py``. Each type runs in a process of its own.
"""

import argparse
import json
import sys
from pathlib import Path

from benchmarks.architectures.sweep import sweep
from benchmarks.architectures.table import summary, write_page
from benchmarks.architectures.tiny import all_types
from benchmarks.architectures.ways import WAYS


def main() -> int:
    """Returns the exit status: 1 if any type gives wrong tokens or an error without a type."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--types", nargs="+", default=None, help="instead of all")
    names = [way.name for way in WAYS]
    parser.add_argument("--ways", nargs="+", choices=names, default=names)
    parser.add_argument("--jobs", type=int, default=2, help="types that run at once")
    parser.add_argument("--timeout-s", type=float, default=300.0, help="for one type")
    parser.add_argument("--json", type=Path, default=None, help="write the results there")
    parser.add_argument("--write", type=Path, default=None, help="write the page of the results")
    args = parser.parse_args()
    ways = [way for way in WAYS if way.name in args.ways]
    results = sweep(args.types or all_types(), ways=ways, jobs=args.jobs, timeout_s=args.timeout_s)
    if args.json is not None:
        args.json.write_text(json.dumps([result.as_dict() for result in results], indent=1))
    if args.write is not None:
        write_page(results, args.write)
    print(summary(results))
    return 1 if any(result.is_fault for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
