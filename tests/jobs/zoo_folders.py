"""Kinds of folders, and of files that are rows."""

import codecs
import gzip
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from tests.jobs.picture_files import encoded
from tests.jobs.zoo_kind import LINES, NUMBERS, Kind, bytes_of, of_bytes, text_table

# ------------------------------------------------------------------ the files


def files(**contents: bytes) -> Callable[[Path], None]:
    """Name -> data; in a name, ``__`` stands for a dot."""

    def write(folder: Path) -> None:
        for name, data in contents.items():
            path = folder / name.replace("__", ".")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)

    return write


def texts(folder: Path) -> None:
    (folder / "a.txt").write_text("Zürich\n")
    (folder / "b.txt").write_bytes(codecs.BOM_UTF8 + b"with a mark")
    (folder / "c.txt").write_text("sixteen", encoding="utf-16")
    (folder / "d.md").write_text("# title")
    (folder / "e.txt.gz").write_bytes(gzip.compress(b"compressed"))
    (folder / "f.txt").write_bytes(b"")


def pictures(folder: Path) -> None:
    """One of each mode: its lowest values, or what is transparent or has no ink."""
    for mode in ("1", "L", "P", "LA", "RGB", "RGBA", "I;16"):
        name = mode.replace(";", "-")
        (folder / f"{name}.png").write_bytes(encoded(Image.new(mode, (4, 4)), "PNG"))
    for mode in ("CMYK", "F", "I"):
        (folder / f"{mode}.tif").write_bytes(encoded(Image.new(mode, (4, 4)), "TIFF"))


def hive(folder: Path) -> None:
    for year, month in (("2025", "1"), ("2026", "__HIVE_DEFAULT_PARTITION__")):
        below = folder / f"year={year}" / f"month={month}"
        below.mkdir(parents=True)
        pq.write_table(pa.table({"n": [int(year)]}), below / "a.parquet")


def no_text_in_name(folder: Path) -> None:
    (folder / "k=%ff").mkdir()
    (folder / "k=%ff" / "a.jsonl").write_bytes(LINES)


def odd_names(folder: Path) -> None:
    below = folder / "in den Süden" / "b c%20d"
    below.mkdir(parents=True)
    (below / "a ü#?.jsonl").write_bytes(LINES)


def upper_case(folder: Path) -> None:
    (folder / "A.JSONL").write_bytes(LINES)


def hidden(folder: Path) -> None:
    (folder / "a.jsonl").write_bytes(LINES)
    (folder / "_SUCCESS").write_bytes(b"")
    (folder / ".a.jsonl.crc").write_bytes(b"x")
    (folder / "_delta_log").mkdir()
    (folder / "_delta_log" / "0.json").write_bytes(LINES)


def one_unknown(folder: Path) -> None:
    (folder / "a.jsonl").write_bytes(LINES)
    (folder / "b.xlsx").write_bytes(b"PK")


def one_damaged(folder: Path) -> None:
    pq.write_table(NUMBERS, folder / "a.parquet")
    (folder / "b.parquet").write_bytes(bytes_of(NUMBERS)[:-20])


def several_formats(folder: Path) -> None:
    (folder / "a.jsonl").write_bytes(LINES)
    (folder / "b.csv").write_bytes(b"n\n1\n")


FOLDERS: dict[str, Kind] = {
    "texts": Kind(
        texts,
        good=text_table(text=["Zürich\n", "with a mark", "sixteen", "# title", "compressed", ""]),
        settings={"map": "tests.jobs.zoo_folders:text_of", "keep": []},
    ),
    "text: bytes that are no text": of_bytes(
        "a.txt",
        b"Z\xfcrich",
        bad={0: "(?i)utf-8"},
        settings={"map": "tests.jobs.zoo_folders:text_of"},
    ),
    "text: latin-1": of_bytes(
        "a.txt",
        b"Z\xfcrich",
        good=text_table(text=["Zürich"]),
        settings={"map": "tests.jobs.zoo_folders:text_of", "keep": [], "encoding": "latin-1"},
    ),
    "pictures": Kind(
        pictures,
        good=pa.table({"grey": [0, 255, 0, 0, 0, 0, 255, 0, 0, 255]}),
        settings={"map": "tests.jobs.zoo_folders:grey_of", "keep": []},
    ),
    "folders that are columns": Kind(
        hive,
        good=pa.table(
            {
                "n": [2025, 2026],
                "year": pa.array([2025, 2026], pa.int32()),
                "month": pa.array([1, None], pa.int32()),
            }
        ),
    ),
    "folders whose columns are no text": Kind(
        no_text_in_name, error="the names of the input's folders: .*%ff"
    ),
    "names with spaces and umlauts": Kind(odd_names, good=NUMBERS),
    "a name in capitals": Kind(upper_case, good=NUMBERS),
    "hidden files": Kind(hidden, good=NUMBERS),
    "a file of an unknown kind beside others": Kind(one_unknown, good=NUMBERS),
    "files of an unknown kind": of_bytes("a.xlsx", b"PK", error="xlsx"),
    "several formats": Kind(several_formats, error="csv, jsonl: name input_format"),
    "an empty folder": Kind(lambda folder: None, error="no (known kind|files)"),
    "a file that is not there": Kind(
        lambda folder: None, error="is not there", file="nothing.jsonl"
    ),
    "one damaged file of two": Kind(one_damaged, good=NUMBERS, has_bad_file=True),
}


# ------------------------------------------------------------------ functions that jobs call


def text_of(row: dict[str, Any]) -> dict[str, Any]:
    return {"text": row["text"]}


def grey_of(row: dict[str, Any]) -> dict[str, Any]:
    """The grey of a picture's first pixel."""
    from jitney_jobs.pictures import pixels_of

    pixels = pixels_of(Path(row["path"]).read_bytes(), width=4, height=4, channels=1)
    return {"grey": int(pixels[0, 0, 0])}
