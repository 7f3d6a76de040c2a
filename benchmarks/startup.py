"""How long after the server's start has each model answered its first request?

    python -m benchmarks.startup [--repository FOLDER] [MODEL …]

Each model is asked as soon as the server listens, all at once: a language model for one token, any
other for one row of zeros. The second table says which processes took how much CPU time until then.
"""

import argparse
import json
import time
import urllib.request
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import psutil
import tritonclient.http as http
from jitney_server.server import TritonServer

ROOT = Path(__file__).resolve().parent.parent
DTYPES = {"FP32": np.float32, "INT64": np.int64, "BYTES": np.object_}


def main() -> None:
    """Start the server once and print both tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", help="of the repository; default: all")
    parser.add_argument("--repository", type=Path, default=ROOT / "model_repository")
    arguments = parser.parse_args()
    begin = time.monotonic()
    with TritonServer(arguments.repository, models=arguments.models or None) as server:
        print(f"{time.monotonic() - begin:7.2f} s until the server is ready")
        names = arguments.models or sorted(server.admin.model_states())
        with ThreadPoolExecutor(len(names)) as pool:
            answered = pool.map(lambda name: (name, ask(server, name)), names)
            for name, at in answered:
                print(f"{at - begin:7.2f} s until {name} has answered")
        assert server.pid is not None
        seconds = cpu_seconds(psutil.Process(server.pid))
    for what, spent in seconds.most_common():
        print(f"{spent:7.2f} CPU s of {what}")
    print(f"{seconds.total():7.2f} CPU s of all")


def ask(server: TritonServer, name: str) -> float:
    """Send one request and wait for its answer. Returns when it came."""
    with http.InferenceServerClient(server.http_url) as client:
        inputs = client.get_model_metadata(name)["inputs"]
        if any(each["name"] == "text_input" for each in inputs):
            body = json.dumps({"text_input": "def add(a, b):", "max_tokens": 1}).encode()
            url = f"http://{server.http_url}/v2/models/{name}/generate"
            urllib.request.urlopen(urllib.request.Request(url, body), timeout=60).read()
        else:
            tensors = []
            for each in inputs:
                array = np.zeros([abs(size) for size in each["shape"]], DTYPES[each["datatype"]])
                tensors.append(http.InferInput(each["name"], array.shape, each["datatype"]))
                tensors[-1].set_data_from_numpy(array)
            client.infer(name, tensors, sequence_id=1, sequence_start=True, sequence_end=True)
    return time.monotonic()


def cpu_seconds(server: psutil.Process) -> Counter[str]:
    """By what a process is; those that have ended count for the one that waited for them."""
    seconds: Counter[str] = Counter()
    for process in [server, *server.children(recursive=True)]:
        line = process.cmdline()
        what = f"{Path(line[0]).name} {line[1] if 'stub' in line[0] else ''}"
        if "jitney.engine.process" in line:
            what = "fork server" if "stub" in " ".join(process.parent().cmdline()) else "engine"
        seconds[what] += sum(process.cpu_times()[:4])
    return seconds


if __name__ == "__main__":
    main()
