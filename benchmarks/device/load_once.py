"""One load of a checkpoint in a process of its own: imports, load, first token. Run by ``load``."""

import time

_STARTED = time.time()

import argparse  # noqa: E402
import json  # noqa: E402

MARK = "loaded: "


def main() -> None:
    """Print one line of JSON: seconds of each phase."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--options", type=json.loads, required=True, help="the engine's, as JSON")
    parser.add_argument("--began", type=float, default=_STARTED, help="when it was started")
    parser.add_argument("--prompt", type=int, default=128, help="tokens of the first request")
    arguments = parser.parse_args()

    from jitney.engine.engine import Engine
    from jitney.messages import Tokens
    from jitney.read_config import make_config

    from benchmarks.device.serving import load_on_gpu, submit

    imported = time.time()
    config = make_config(arguments.options)
    engine = Engine(config, load_on_gpu(config))
    loaded = time.time()
    key = submit(engine, [11 + i % 100 for i in range(arguments.prompt)], 2)
    first = None
    while first is None:
        report = engine.step()
        for event in report.events if report else ():
            if isinstance(event, Tokens) and event.key == key and event.ids:
                first = time.time()
            elif not isinstance(event, Tokens):
                raise SystemExit(f"no token came: {event}")
    found = {
        "imports_s": imported - arguments.began,
        "load_s": loaded - imported,
        "first_token_s": first - loaded,
    }
    print(MARK + json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
