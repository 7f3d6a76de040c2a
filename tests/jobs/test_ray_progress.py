"""How far a job on a Ray cluster is; without a cluster."""

from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest
from jitney_jobs.dataset import Dataset
from jitney_jobs.journal import FileRows, JobJournal
from jitney_jobs.output import Output
from jitney_jobs.tasks import Context

from tests.jobs.job_rows import ids, job_of, write_lines

pytest.importorskip("ray")
from jitney_jobs import ray_data


def test_the_share_of_a_resumed_job_counts_each_file_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "in").mkdir()
    for file in range(4):
        write_lines(tmp_path / "in" / f"{file}.jsonl", ids(20, 30))
    job = job_of(tmp_path / "in", tmp_path / "out", ray="local")
    read_before = FileRows(0, 10)
    read_twice = FileRows(1, 10)
    batch = ray_data._batch_of([read_twice, read_twice])
    fake_ray = SimpleNamespace(
        cluster_resources=dict,
        remote=lambda **needs: lambda function: SimpleNamespace(remote=function),
        get=lambda reference: reference,
        shutdown=lambda: None,
        exceptions=ray_data.ray.exceptions,
    )
    monkeypatch.setattr(ray_data, "ray", fake_ray)
    monkeypatch.setattr(ray_data, "_connect", lambda address: None)
    monkeypatch.setattr(ray_data, "_context_of", Context)
    monkeypatch.setattr(ray_data, "_stream", lambda *given: iter([batch]))
    with ExitStack() as closing:
        journal = JobJournal(job)
        closing.callback(journal.close)
        dataset = Dataset(job)
        output = Output(job, dataset, journal)
        journal.begin_or_resume(job, dataset.files, dataset.files_are_rows)
        journal.append(read_before)
        pipeline = ray_data.RayPipeline(job, dataset, journal, output, closing)
        assert pipeline._snapshot()["position"] == 1 / 4
        assert pipeline._advance()
        assert pipeline._snapshot()["position"] == 2 / 4
