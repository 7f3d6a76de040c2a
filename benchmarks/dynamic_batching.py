"""Dynamic batching and the ONNX Runtime stand-in in figures, with perf_analyzer on the real server.

    python -m benchmarks.dynamic_batching             # about six minutes on two cores
    python -m benchmarks.dynamic_batching --quick     # one short turn of each

Dynamic batching against none at 1, 4, 16 and 32 requests at once; the stand-in at saturation
against ONNX Runtime in a loop; int8 against fp32; and what the server adds to a request of one row.
All of one server start. perf_analyzer, the server and the model share the machine's cores.
"""

import argparse
import os
import re
import sys
import tempfile
from pathlib import Path

from jitney_measure.target import Target
from jitney_server.server import TritonServer

from benchmarks.batching import figures
from benchmarks.batching.subjects import ROOT, SUBJECTS, Subject, built, encode, make

_TEXTS = 200
_TEXT_TOKENS = 64
_INT8 = "minilm_int8"


def main() -> None:
    """Build what is missing, start the server, print a table for each figure."""
    arguments = _parse()
    threads = arguments.threads or len(os.sched_getaffinity(0))
    subjects = {name: make_subject() for name, make_subject in SUBJECTS.items()}
    rows = subjects["minilm"].rows
    subjects[_INT8] = _subject(_INT8, rows)
    texts = encode(_sentences(), _TEXT_TOKENS)
    pair = _subject("minilm", texts), _subject(_INT8, texts)
    with tempfile.TemporaryDirectory(prefix="dynamic-batching-") as folder:
        setup = figures.Setup(
            folder=Path(folder),
            subjects=subjects,
            threads=threads,
            repeats=1 if arguments.quick else arguments.repeats,
            seconds=0.5 if arguments.quick else 1.5,
        )
        with TritonServer(figures.write_repository(setup)) as server:
            setup.use(Target.of(server.grpc_url, server.http_url, None))
            for title, text in (
                ("Dynamic batching against none", lambda: figures.batching(setup)),
                ("Saturation", lambda: figures.saturation(setup)),
                ("int8 against fp32", lambda: figures.precision(setup, *pair)),
                ("Overhead of the server", lambda: figures.overhead(setup)),
            ):
                if title.split()[0].lower() in arguments.only:
                    print(f"\n### {title}\n\n{text()}", flush=True)
    print(file=sys.stderr)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts = ["dynamic", "saturation", "int8", "overhead"]
    parser.add_argument("--quick", action="store_true", help="one short turn of each")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, help="of each model; default: all cores")
    parser.add_argument(
        "--only", type=lambda text: text.split(","), default=parts, help=",".join(parts)
    )
    arguments = parser.parse_args()
    for part in arguments.only:
        if part not in parts:
            parser.error(f"part {part!r} is unknown; there are {', '.join(parts)}")
    return arguments


def _subject(name: str, rows: dict) -> Subject:
    options = ("--int8",) if name == _INT8 else ()
    folder = built("minilm", *options, folder_name=name)
    return make(name, folder, rows, "sentence_embedding", tolerance=1e-4)


def _sentences() -> list[str]:
    """English text of all lengths: the sentences of this project's documents."""
    found: list[str] = []
    for page in sorted((ROOT / "docs").glob("*.md")):
        text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.S)
        for paragraph in text.split("\n\n"):
            if not paragraph.startswith(("|", "#", "<")):
                found += re.split(r"(?<=[.:;]) ", " ".join(paragraph.split()))
    distinct = list(dict.fromkeys(s for s in found if len(s) >= 15))
    return distinct[:: max(1, len(distinct) // _TEXTS)][:_TEXTS]


if __name__ == "__main__":
    main()
