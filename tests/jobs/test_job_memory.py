"""Memory of a job does not grow with its input, nor with its rows or their results: at most 300 MB
over that of a job of small rows, of all its processes together (proportional set size)."""

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
MOST_MB = 300
LARGE = 500_000
COUNT = 800
SCRIPT = """
import json, sys
from pathlib import Path
from tests.jobs.job_rows import run
source, output, settings = sys.argv[1:]
print(run(Path(source), Path(output), workers=1, **json.loads(settings)))
"""


def text_of(i: int) -> str:
    return chr(97 + i % 26) * LARGE


def small(folder: Path) -> Path:
    source = folder / "in.csv"
    source.write_text("id,text\n" + "".join(f"{i},x\n" for i in range(COUNT)))
    return source


def csv(folder: Path) -> Path:
    source = folder / "in.csv"
    with source.open("w") as file:
        file.write("id,text\n")
        file.writelines(f'{i},"{text_of(i)}"\n' for i in range(COUNT))
    return source


def texts(folder: Path) -> Path:
    (folder / "in").mkdir()
    for i in range(COUNT):
        (folder / f"in/{i:04}.txt").write_text(text_of(i))
    return folder / "in"


def numbers(folder: Path) -> Path:
    source = folder / "in.jsonl"
    source.write_text("".join(f'{{"id": {i}}}\n' for i in range(COUNT)))
    return source


def equal_texts(folder: Path) -> Path:
    """Parquet has such a text once."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"text": ["x" * LARGE] * COUNT}), folder / "in.parquet")
    return folder / "in.parquet"


def peak_mb(source: Path, output: Path, **settings: Any) -> float:
    settings = {"map": "tests.jobs.job_rows:marked", **settings}
    words = [sys.executable, "-c", SCRIPT, str(source), str(output), json.dumps(settings)]
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    process = subprocess.Popen(
        words, env={**os.environ, "PYTHONPATH": path}, stdout=subprocess.PIPE, text=True
    )
    root = psutil.Process(process.pid)
    most = 0.0
    while process.poll() is None:
        most = max(most, _pss_mb(root))
        time.sleep(0.02)
    said, _ = process.communicate()
    assert said == "True\n"
    return most


def _pss_mb(root: psutil.Process) -> float:
    total = 0
    with contextlib.suppress(psutil.NoSuchProcess):
        for process in (root, *root.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                total += process.memory_full_info().pss
    return total / 1e6


@pytest.fixture(scope="module")
def of_small_rows(tmp_path_factory: pytest.TempPathFactory) -> float:
    folder = tmp_path_factory.mktemp("small")
    return peak_mb(small(folder), folder / "out")


@pytest.mark.parametrize("output_format", ["parquet", "jsonl"])
@pytest.mark.parametrize("write", [csv, texts, equal_texts, numbers])
def test_large_rows_and_large_results(
    tmp_path: Path, of_small_rows: float, write: Callable[[Path], Path], output_format: str
) -> None:
    settings = {"output_format": output_format}
    if write is numbers:
        settings["map"] = "tests.jobs.job_rows:large"
    most = peak_mb(write(tmp_path), tmp_path / "out", **settings)
    print(f"{most - of_small_rows:,.0f} MB over {of_small_rows:,.0f} MB")
    assert most - of_small_rows < MOST_MB
