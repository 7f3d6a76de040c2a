"""What the process of a job on a Ray cluster makes of what it finds on the board; without a
cluster."""

from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pyarrow as pa
import pytest
from jitney.errors import UnavailableError
from jitney_jobs.dataset import Dataset
from jitney_jobs.job import Job
from jitney_jobs.job_run import JobRun
from jitney_jobs.journal import FileRows, Interval, JobJournal
from jitney_jobs.outcome import TooManyBadRows
from jitney_jobs.output import Output
from jitney_jobs.part_maker import WrittenPart
from jitney_jobs.tasks import Context

from tests.jobs.job_rows import ids, job_of, write_lines

pytest.importorskip("ray")
from jitney_jobs import ray_cluster, ray_pipeline
from jitney_jobs.ray_board import BoardMessage, Report, Taken

Answers = list[dict[str, Any]]


class FakeCluster:
    """A job's process, beside a cluster that does what a test says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, job: Job, closing: ExitStack) -> None:
        self.actors_of_node = 1
        self.gpus_of_actor = 0
        self.rounds: list[list[int]] = []
        """For each round, the files that were to be read."""
        self.told: list[Interval] = []
        """Rows that the board was told are committed."""
        self._taken = Taken({}, [], {})
        self._answers: Answers = []
        self._ended: Future[None] = Future()
        fake_ray = SimpleNamespace(
            get=lambda reference: reference,
            wait=lambda references, timeout: (references, []),
            exceptions=ray_pipeline.ray.exceptions,
        )
        monkeypatch.setattr(ray_pipeline, "ray", fake_ray)
        monkeypatch.setattr(ray_pipeline, "_POLL_S", 0.0)
        monkeypatch.setattr(ray_pipeline, "Cluster", lambda address, closing: self)
        monkeypatch.setattr(ray_pipeline, "Board", lambda: self)
        monkeypatch.setattr(ray_pipeline, "Stream", self._begin)
        journal = JobJournal(job)
        closing.callback(journal.close)
        self.record = journal.record
        dataset = Dataset(job)
        self.folder = Path(job.output)
        self._output = Output(job, dataset, journal)
        journal.begin_or_resume(job, dataset.files, dataset.files_are_rows)
        self.pipeline = ray_pipeline.RayPipeline(
            job, dataset, journal, self._output, closing, print
        )
        self.run = JobRun(job, journal, self._output, self.pipeline)

    def call(self, function: object, argument: Any, patience_s: float, say: object) -> Context:
        return Context(argument)

    @property
    def has_ended(self) -> bool:
        return self._ended.done()

    def check(self) -> None:
        """It is there."""

    def begin_taking(self, committed: list[Interval]) -> Taken:
        self.told += committed
        taken = self._taken
        self._taken = taken._replace(messages=[])
        return taken

    def end_actors(self) -> None:
        self._ended.set_exception(ray_pipeline.ray.exceptions.RayActorError())

    def end_round(self) -> None:
        """No report has rows in an actor's hands any more."""

    def _begin(self, cluster: object, plan: object, record: Any, without: Any, left: Any) -> Any:
        files = [f for f in range(4) if f not in without and not record.is_done(f)]
        self.rounds.append(files)
        self._ended = Future()
        return SimpleNamespace(ended=self._ended, take_answers=self._take_answers)

    def _take_answers(self) -> Iterator[pa.Table]:
        answers = self._answers
        self._answers = []
        yield pa.Table.from_pylist(answers, ANSWER)

    def shows(
        self,
        *messages: BoardMessage,
        reports: Any = None,
        starts: Any = None,
        answers: Any = (),
        ends: Any = False,
    ) -> bool:
        """The next look at the board. Returns whether the run goes on."""
        if not self.rounds:
            self.pipeline.advance()
        self._taken = Taken(
            reports or {}, list(messages), {"actor": 1} if starts is None else starts
        )
        self._answers += answers
        if ends:
            self._ended.set_result(None)
        return self.pipeline.advance()

    def part(self, file: int, first: int, end: int) -> WrittenPart:
        """As an actor has written it."""
        name = f"part-00000-{file}-{first}-{len(list(self.folder.iterdir()))}.jsonl"
        (self.folder / name).write_bytes(b"{}\n")
        count = end - first
        return WrittenPart({name: 3}, [Interval(file, first, end)], count, 0, 0, None, 0, 0, 0)

    @property
    def there(self) -> set[str]:
        return {path.name for path in self.folder.glob("part-*")}

    @property
    def committed(self) -> set[str]:
        return {name for part in self.record.parts for name in part.files}


ANSWER = pa.schema([("is_whole", pa.bool_()), ("parts", pa.list_(pa.binary()))])
COUNTS = [FileRows(file, 10) for file in range(4)]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Four files of ten rows."""
    (tmp_path / "in").mkdir()
    for file in range(4):
        write_lines(tmp_path / "in" / f"{file}.jsonl", ids(20, 30))
    return tmp_path / "in"


@pytest.fixture
def closing() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def test_rows_that_come_twice_count_once(
    source: Path, closing: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part with a row of an earlier one is deleted; what is missing then is read once more."""
    job = job_of(source, source.parent / "out", ray="local")
    cluster = FakeCluster(monkeypatch, job, closing)
    first = [cluster.part(0, 0, 6), cluster.part(1, 0, 10), cluster.part(2, 0, 10)]
    assert cluster.shows(*COUNTS, *first)
    twice = cluster.part(0, 5, 10)
    assert cluster.shows(twice, cluster.part(3, 0, 10), ends=True)
    assert cluster.there == cluster.committed
    assert not cluster.committed & twice.files.keys()
    assert cluster.rounds == [[0, 1, 2, 3], [0]]
    assert not cluster.shows(cluster.part(0, 6, 10), ends=True)
    assert sum(part.written for part in cluster.record.parts) == 40


def test_a_round_that_brings_no_missing_row_ends_the_run(
    source: Path, closing: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = FakeCluster(monkeypatch, job_of(source, source.parent / "out", ray="local"), closing)
    assert cluster.shows(*COUNTS, cluster.part(0, 0, 10), ends=True)
    with pytest.raises(UnavailableError, match=r"10 of 40 rows came back.*resume the job"):
        cluster.shows(ends=True)


def test_a_file_that_is_gone_is_bad_with_the_rows_that_came(
    source: Path, closing: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray may read a file again that it had read: then fewer rows of it are there than are
    committed."""
    cluster = FakeCluster(monkeypatch, job_of(source, source.parent / "out", ray="local"), closing)
    parts = [cluster.part(file, 0, 10) for file in range(3)]
    gone = FileRows(3, 0, "it is gone")
    assert not cluster.shows(*COUNTS, *parts, gone, cluster.part(3, 2, 6), ends=True)
    assert cluster.record.bad_files == {3: "it is gone"}
    assert cluster.record.row_counts[3] == 6


def test_no_part_is_committed_behind_a_block_that_was_given_up(
    source: Path, closing: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the order is kept. Those of the block itself come before the row that it lacks."""
    job = job_of(source, source.parent / "out", ray="local", ordered=True)
    cluster = FakeCluster(monkeypatch, job, closing)
    parts = [cluster.part(file, 0, 10) for file in range(3)]
    answers = [
        {"is_whole": number != 1, "parts": [msgspec.json.encode(part)]}
        for number, part in enumerate(parts)
    ]
    assert cluster.shows(answers=answers)
    assert cluster.committed == parts[0].files.keys() | parts[1].files.keys()
    assert cluster.there == cluster.committed


def test_the_figures_are_those_of_all_processes(
    source: Path, closing: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows count from the first one that has ended, and each once."""
    cluster = FakeCluster(monkeypatch, job_of(source, source.parent / "out", ray="local"), closing)
    reports = {
        "reader": Report({"read_s": 1.0, "position": 0.125}),
        "actor": Report({"position": 0.25, "taken": 9.0, "steps": 2.0, "most_rows": 8.0}, 5, 1),
        "other": Report({"position": 0.25, "taken": 8.0, "steps": 3.0, "most_rows": 6.0}, 2),
    }
    assert cluster.shows(cluster.part(0, 0, 3), reports=reports)
    figures = cluster.pipeline.snapshot()
    assert figures["position"] == 0.625
    assert figures["done"] == 3 + 5 + 2
    assert figures["bad"] == 1
    assert figures["taken"] == 17
    assert figures["steps"] == 5
    assert figures["most_rows"] == 8


def test_bad_rows_end_the_job_before_a_part_has_them(
    source: Path, closing: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = job_of(source, source.parent / "out", ray="local", max_errors="2")
    cluster = FakeCluster(monkeypatch, job, closing)
    report = Report({"taken": 5.0, "position": 0.1}, ended=5, bad=3, bad_example="row 1 of a: odd")
    assert cluster.shows(reports={"actor": report})
    with pytest.raises(TooManyBadRows, match=r"3 of 5 rows are bad.*row 1 of a: odd"):
        cluster.run._check_bad_rows(has_ended=False)


def test_the_share_of_a_resumed_job_has_the_files_that_are_done(
    source: Path, closing: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = job_of(source, source.parent / "out", ray="local")
    with ExitStack() as first_run:
        cluster = FakeCluster(monkeypatch, job, first_run)
        cluster.shows(*COUNTS, cluster.part(0, 0, 10), cluster.part(1, 0, 10))
    resumed = FakeCluster(monkeypatch, job, closing)
    assert resumed.shows(reports={"actor": Report({"position": 0.25})})
    assert resumed.rounds == [[2, 3]]
    assert resumed.pipeline.snapshot()["position"] == 0.75


def test_the_board_is_told_what_is_committed(
    source: Path, closing: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that an actor that is given a block again leaves these rows out."""
    cluster = FakeCluster(monkeypatch, job_of(source, source.parent / "out", ray="local"), closing)
    assert cluster.shows(cluster.part(0, 0, 6))
    assert cluster.shows(cluster.part(0, 5, 10))
    assert cluster.shows()
    assert cluster.told == [Interval(0, 0, 6)]


def test_an_actor_that_dies_again_and_again_ends_the_run(
    source: Path, closing: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless parts come meanwhile."""
    cluster = FakeCluster(monkeypatch, job_of(source, source.parent / "out", ray="local"), closing)
    assert cluster.shows(starts={"actor": 4})
    assert cluster.shows(cluster.part(0, 0, 6), starts={"actor": 5})
    assert cluster.shows(starts={"actor": 9})
    with pytest.raises(UnavailableError, match=r"an actor of the Ray cluster has died 4 times"):
        cluster.shows(starts={"actor": 10})
    assert cluster.has_ended, "this process may join the cluster again for another job"


def test_the_user_is_told_of_a_cluster_without_room(
    source: Path, closing: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_cluster, "_FULL_S", 0.0)
    free = SimpleNamespace(
        cluster_resources=lambda: {"CPU": 2.0}, available_resources=lambda: {"CPU": 0.1}
    )
    monkeypatch.setattr(ray_cluster, "ray", free)
    job = job_of(source, source.parent / "out", ray="local", patience="1h")
    cluster = FakeCluster(monkeypatch, job, closing)
    cluster.shows(starts={})
    needs = "Ray cluster for 0 s; an actor needs 0.2 CPU of a node (0.1 of 2 are free)"
    assert needs in str(cluster.run.take_news())
    cluster.shows(starts={"actor": 1})
    cluster.shows()
    assert cluster.pipeline.waits_for() is None


def test_a_run_waits_for_room_as_long_as_its_patience(
    source: Path, closing: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = SimpleNamespace(cluster_resources=dict, available_resources=dict)
    monkeypatch.setattr(ray_cluster, "ray", free)
    job = job_of(source, source.parent / "out", ray="local", patience="0s")
    cluster = FakeCluster(monkeypatch, job, closing)
    with pytest.raises(UnavailableError, match=r"for 0 s \(patience\); an actor needs 0\.2 CPU"):
        cluster.shows(starts={})


def test_the_share_of_a_killed_run_ends_soon() -> None:
    """Else a resumed run gets no CPU of a small cluster for minutes. A run that lives asks for its
    share again before it ends."""
    from ray.data._internal.cluster_autoscaler import RateBasedClusterAutoscaler as Autoscaler

    share_s = Autoscaler.AUTOSCALING_REQUEST_EXPIRE_TIME_S
    assert 2 * Autoscaler.MIN_GAP_BETWEEN_AUTOSCALING_REQUESTS_S < share_s <= 60
