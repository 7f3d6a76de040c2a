"""The report of a job: a page with its throughput over time, and where the time went."""

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from jitney_jobs.addresses import name_of_output
from jitney_jobs.job_figures import JobFigures, throughput_of
from jitney_jobs.journal import Record
from jitney_jobs.output import write_errors
from jitney_jobs.output_files import objects_at

if TYPE_CHECKING:
    from jitney_measure.pages.page import Block, Plot, Table

_STAGES = {
    "read_s": "read: the reader's thread at work",
    "prepare_s": "prepare: over all workers",
    "waited_s": "the executor waited for prepared rows",
    "run_s": "run: the model at work",
    "write_s": "write: parts and journal",
}
"""Figures of a run -> their names in the report."""


def write_report(record: Record) -> Path | str:
    """``report.html`` beside the journal. Returns where it is. Raises UnavailableError if the
    storage of the output fails."""
    assert record.begin is not None
    if record.folder is not None:
        return _write_page(record, record.folder)
    job = record.begin.job
    objects = objects_at(job.output, job.retries)
    with tempfile.TemporaryDirectory() as folder:
        page = _write_page(record, Path(folder))
        with write_errors(job):
            objects.put(f"_job/{page.name}", page.read_bytes())
    return objects.address_of(f"_job/{page.name}")


def _write_page(record: Record, folder: Path) -> Path:
    from jitney_measure.pages.page import Heading, Terms, write_page

    assert record.begin is not None
    job = record.begin.job
    figures = JobFigures(record)
    blocks = _summary(record, figures)
    if record.parts:
        blocks.append([_plot_of_throughput(record)])
    blocks.append(_table_of_stages(record, figures))
    fields = job.fields_that_shape_output.items()
    settings = {name: str(value) for name, value in fields if value not in (None, [], {}, "")}
    blocks += [Heading("Settings"), Terms(settings)]
    return write_page(f"Job {name_of_output(job.output)}", blocks, folder)


def _summary(record: Record, figures: JobFigures) -> "list[Block]":
    from jitney_measure.pages.page import Text

    assert record.begin is not None
    job = record.begin.job
    size = sum(file.size for file in record.begin.files)
    state = "Complete" if record.end else "Not complete"
    rows = f"{record.written:,} rows written, {record.failed:,} bad, in {figures.rate_text}"
    return [
        Text(f"{job.task} · {job.model or job.map} · {job.input} · {size:,} bytes", "dim"),
        Text(f"{state}: {rows}", "best" if record.end else "best caution"),
        Text(f"Cost: {figures.cost_text}. Runs: {figures.run_count}."),
    ]


def _plot_of_throughput(record: Record) -> "Plot":
    from jitney_measure.pages.plots import over_time  # matplotlib may be missing

    caption = "Throughput over time, a point for each part."
    throughput = throughput_of(record.parts)
    curves = {"rows/s": throughput.rates}
    if any(throughput.filled):
        curves["share of the batch filled"] = throughput.filled
    return over_time("throughput", caption, throughput.ends, curves)


def _table_of_stages(record: Record, figures: JobFigures) -> "Table":
    from jitney_measure.pages.page import Table, TableRow

    row_count = max(1, record.written + record.failed)
    rows = []
    for figure, name in _STAGES.items():
        stage_s = figures.total(figure)
        share = stage_s / figures.seconds
        ms_a_row = 1000 * stage_s / row_count
        rows.append(TableRow([name, f"{stage_s:,.2f}", f"{share:.0%}", f"{ms_a_row:.3f}"]))
    head = ("stage", "seconds", "share of the time", "ms a row")
    return Table("Where the time went", head, rows)
