"""Files and batches on a folder, with a server that answers lines by their prompts."""

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from jitney.errors import UnavailableError
from jitney_gateway.app import make_app
from jitney_gateway.keys import FixedKeys
from jitney_gateway.refusals import UnknownModelError
from jitney_jobs.asking import request_digest
from jitney_jobs.batches import form, records
from jitney_jobs.batches import lines as batch_lines
from jitney_jobs.batches import work as batch_work
from jitney_jobs.batches.records import BatchRecord, Folder
from jitney_jobs.batches.service import BatchService
from jitney_jobs.batches.work import BatchWork
from jitney_jobs.worker import worker
from starlette.testclient import TestClient

from tests.jobs import fake_api
from tests.jobs.fake_api import KEY, Api
from tests.real_server.client import wait_until

ALICE = {"authorization": f"Bearer {KEY}"}
BOB = {"authorization": "Bearer bob"}
CHECKED: dict[str, Exception] = {
    "nowhere": UnknownModelError("there is no model nowhere"), "away": UnavailableError("away"),
}  # fmt: skip


class Checks:
    """In place of a server."""

    async def find_model_for(self, endpoint: str, model: str) -> None:
        if model in CHECKED:
            raise CHECKED[model]

    async def close(self) -> None:
        pass


class Place:
    """A gateway of two clients, whose thread is the test."""

    def __init__(self, root: Path, url: str) -> None:
        self.folder = Folder(root)
        self.folder.key_file("alice").write_text(f"alice:{KEY}\n", encoding="utf-8")
        keys = {KEY: "alice", "bob": "bob"}
        app = make_app(Checks(), FixedKeys(keys), services=[BatchService(self.folder)])  # type: ignore[arg-type]
        self.client = TestClient(app, headers=ALICE)
        self.url = url
        self.work = BatchWork(self.folder, url)

    def upload(self, lines: list[Any], **form: Any) -> Any:
        data = b"\n".join(x if isinstance(x, bytes) else json.dumps(x).encode() for x in lines)
        form = {"purpose": "batch", **form}
        return self.client.post("/v1/files", data=form, files={"file": ("in.jsonl", data)})

    def create(self, lines: list[Any], **fields: Any) -> Any:
        body = batch_of(self.upload(lines).json()["id"], **fields)
        return self.client.post("/v1/batches", json=body)

    def make(self, lines: list[Any], **fields: Any) -> str:
        made = self.create(lines, **fields).json()
        assert made["status"] == "in_progress", made
        return made["id"]

    def see(self, id_: str) -> Any:
        return self.client.get(f"/v1/batches/{id_}").json()

    def run_jobs(self) -> None:
        with contextlib.suppress(typer.Exit):
            worker(self.folder.queue, until_empty=True, tries=1, server=self.url)

    def lines(self, file_id: str | None) -> dict[Any, Any]:
        """By custom_id; each must be there once."""
        if file_id is None:
            return {}
        text = self.client.get(f"/v1/files/{file_id}/content").text
        found = [json.loads(line) for line in text.splitlines()]
        made = {one["custom_id"]: one for one in found}
        assert len(made) == len(found)
        return made


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    with fake_api.api() as url:
        yield Place(tmp_path / "batches", url)


def line(custom_id: str, model: str = "m", **changes: Any) -> dict[str, Any]:
    body = {"model": model, "prompt": changes.pop("prompt", custom_id)}
    made = {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": body}
    return {**made, **changes}


BAD: list[tuple[Any, str | None, str]] = [
    (line("a", prompt="again"), "custom_id", "custom_id is that of an earlier line"),
    (line("d", model="other"), "body.model", "body.model is 'other', but this batch is for 'm'"),
    (line("e", url="/v1/embeddings"), "url",
     "url is '/v1/embeddings', but this batch is for '/v1/completions'"),
    (line("f", method="GET"), "method", "method is 'GET', but must be POST"),
    ({"custom_id": "g"}, "method", "method is missing"),
    (b"no JSON", None, "the body: JSON is malformed: invalid character"),
    (b'{"body": ' + b"[" * 3000 + b"]" * 3000 + b"}", None, "the body: maximum recursion depth"),
]  # fmt: skip


def test_each_request_is_in_one_of_two_files(place: Place) -> None:
    id_ = place.make([*map(line, "abc"), b"", line("refused")], metadata={"night": "1"})
    place.work.advance(id_)
    assert place.see(id_)["status"] == "in_progress"
    place.run_jobs()
    assert place.see(id_)["request_counts"] == {"total": 4, "completed": 3, "failed": 1}
    place.work.advance(id_)
    done = place.see(id_)
    assert done["status"] == "completed"
    assert done["request_counts"] == {"total": 4, "completed": 3, "failed": 1}
    assert done["metadata"] == {"night": "1"}
    good, bad = place.lines(done["output_file_id"]), place.lines(done["error_file_id"])
    assert good.keys() == {*"abc"}
    asked = {"model": "m", "prompt": "b", "service_tier": "flex"}
    assert good["b"]["response"]["body"]["body"] == asked
    assert bad.keys() == {"refused"}
    assert bad["refused"]["response"]["status_code"] == 400
    assert bad["refused"]["response"]["body"] == {"error": "refused"}
    for custom_id, answer in (good | bad).items():
        assert answer["id"] == f"batch_req_{request_digest(custom_id)}"
    place.work.advance(id_)
    assert not [*place.folder.work.iterdir(), *place.folder.queue.glob("*/*")]
    assert place.see(id_) == done
    assert Api.asked == {"a": 1, "b": 1, "c": 1, "refused": 1}


def test_a_line_is_flex_unless_it_says_so_itself(place: Place) -> None:
    """No name of a tier is kept: the model may be loaded with others before a line is asked."""
    named = line("b")
    named["body"] |= {"service_tier": "priority"}
    id_ = place.make([line("a"), named])
    place.work.advance(id_)
    place.run_jobs()
    place.work.advance(id_)
    good = place.lines(place.see(id_)["output_file_id"])
    asked = {name: good[name]["response"]["body"]["body"] for name in "ab"}
    assert asked["a"] == {"model": "m", "prompt": "a", "service_tier": "flex"}
    assert asked["b"] == {"model": "m", "prompt": "b", "service_tier": "priority"}


def test_lines_at_fault_are_told(place: Place) -> None:
    """As OpenAI does: nothing of such a file is run."""
    failed = place.create([line("a"), b"", *(bad for bad, _, _ in BAD)]).json()
    assert failed["status"] == "failed"
    faults = failed["errors"]["data"]
    assert [each["line"] for each in faults] == [*range(3, 3 + len(BAD))]
    for (_, field, said), told in zip(BAD, faults, strict=True):
        assert (told["param"], told["code"]) == (field, "invalid_value")
        assert told["message"].startswith(said)
    assert not [*place.folder.work.iterdir()]


@pytest.mark.parametrize("end", ["cancelled", "expired"])
def test_what_is_not_done_by_then_says_so(place: Place, end: str) -> None:
    id_ = place.make([line("a"), line("b")])
    place.work.advance(id_)
    if end == "cancelled":
        assert place.client.post(f"/v1/batches/{id_}/cancel").json()["status"] == "cancelling"
        assert place.see(id_)["cancelling_at"] is not None
    else:
        batch = place.folder.load(BatchRecord, id_)
        batch.expires_at = int(time.time())
        place.folder.save(batch)
    place.work.advance(id_)
    done = place.see(id_)
    assert done["status"] == end
    assert done[f"{end}_at"] is not None
    assert done["output_file_id"] is None
    codes = {key: one["error"]["code"] for key, one in place.lines(done["error_file_id"]).items()}
    assert codes == dict.fromkeys("ab", f"batch_{end}")
    assert place.client.post(f"/v1/batches/{id_}/cancel").status_code == 409


def test_batches_that_fail(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_lines, "MAX_LINES", 2)
    monkeypatch.setattr(batch_lines, "MAX_FAULTS", 3)
    monkeypatch.setattr(batch_lines, "MAX_BODY_BYTES", 200)
    for lines, said, number in (
        ([b"", b" "], "the input file must have 1 to 2 requests", 1),
        ([*map(line, "abc"), b"never read"], "the input file must have 1 to 2 requests", 1),
        ([line("a", model="nowhere")], "there is no model nowhere", 1),
        ([b"x"] * 4, "the body: JSON is malformed", 3),
        ([line("a", prompt="x" * 200)], "the line has more than 200 bytes", 1),
    ):
        failed = place.create(lines).json()
        assert failed["status"] == "failed"
        assert failed["failed_at"] is not None
        assert said in failed["errors"]["data"][0]["message"]
        assert len(failed["errors"]["data"]) == number
    refused = place.create([line("a", model="away")])
    assert refused.status_code == 503
    assert refused.headers["retry-after"]


def test_a_job_that_fails_says_why(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(batch_work._JOB, "patience", "0")
    id_ = place.make([line("gone")])
    place.work.advance(id_)
    place.run_jobs()
    place.work.advance(id_)
    failed = place.see(id_)
    assert failed["status"] == "failed"
    assert "404" in failed["errors"]["data"][0]["message"]
    assert place.lines(failed["error_file_id"]).keys() == {"gone"}


def test_every_step_may_be_cut_off(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """At each of its changes of the disk in turn."""
    write, rename = Folder.save, Path.rename
    left = 0

    def limited(change: Any) -> Any:
        def changed(*arguments: Any) -> Any:
            nonlocal left
            left -= 1
            if left == 0:
                raise OSError("cut off")
            return change(*arguments)

        return changed

    monkeypatch.setattr(Folder, "save", limited(write))
    monkeypatch.setattr(Path, "rename", limited(rename))
    cuts = 0
    while left <= 0:
        left = 1_000_000
        id_ = place.make([line("a"), line("refused")])
        left, cuts = cuts + 1, cuts + 1
        while place.folder.work.joinpath(id_).exists():
            with contextlib.suppress(OSError):
                place.work.advance(id_)
            before, left = left, 1_000_000
            place.run_jobs()
            left = before
        done = place.see(id_)
        assert done["status"] == "completed"
        assert done["request_counts"] == {"total": 2, "completed": 1, "failed": 1}
        assert [*place.lines(done["output_file_id"])] == ["a"]
        assert [*place.lines(done["error_file_id"])] == ["refused"]
    assert cuts > 6


def test_what_a_killed_maker_left_goes(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    left = place.folder.work / records.new_id("batch_")
    left.mkdir()
    place.work._look()
    assert left.exists(), "its maker may be about to save it"
    monkeypatch.setattr(batch_work, "_ABANDONED_S", -1.0)
    place.work._look()
    assert not left.exists()


def test_files(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    files = [place.upload([line(name)]).json() for name in "abc"]
    assert files[0]["filename"] == "in.jsonl"
    assert files[0]["bytes"] == len(json.dumps(line("a")))
    ids = [file["id"] for file in reversed(files)]

    def listed(**query: Any) -> list[str]:
        return [each["id"] for each in place.client.get("/v1/files", params=query).json()["data"]]

    assert listed() == listed(purpose="batch") == ids
    assert listed(limit=2) == ids[:2]
    assert listed(after=ids[1]) == ids[2:]
    assert listed(purpose="batch_output") == []
    assert listed(order="desc", foo=1) == ids
    assert listed(order="asc") == ids[::-1]
    assert listed(order="asc", after=ids[1]) == ids[:1]
    for query in ({"limit": 0}, {"limit": "x"}, {"limit": "9" * 5000}, {"order": "up"}):
        refused = place.client.get("/v1/files", params=query)
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == next(iter(query))
    assert place.client.get(f"/v1/files/{ids[0]}/content").json()["custom_id"] == "c"
    id_ = place.client.post("/v1/batches", json=batch_of(ids[0])).json()["id"]
    assert place.client.delete(f"/v1/files/{ids[0]}").json()["deleted"]
    assert place.client.get(f"/v1/files/{ids[0]}").status_code == 404
    assert listed() == ids[1:]
    place.work.advance(id_)
    assert place.see(id_)["status"] == "in_progress", "it has its own"
    refused = place.upload([], purpose="vision")
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "purpose"
    kept = place.upload([line("d")], **{"expires_after[seconds]": "3600"})
    assert kept.status_code == 200
    assert kept.headers["jitney-ignored"] == "expires_after[seconds]"
    assert place.client.post("/v1/files", json={}).json()["error"]["param"] == "file"
    monkeypatch.setattr(form, "MAX_FILE_BYTES", 1000)
    assert place.upload([b"x" * 100_000]).status_code == 413


def batch_of(id_: str, **changes: Any) -> dict[str, Any]:
    made = {"input_file_id": id_, "endpoint": "/v1/completions", "completion_window": "24h"}
    return {**made, **changes}


def test_nobody_sees_what_is_anothers(place: Place) -> None:
    id_ = place.make([line("a")])
    file_id = place.see(id_)["input_file_id"]
    for path in (f"/v1/batches/{id_}", f"/v1/files/{file_id}", f"/v1/files/{file_id}/content"):
        assert place.client.get(path).status_code == 200
        assert place.client.get(path, headers=BOB).status_code == 404
    for path in ("/v1/batches", "/v1/files"):
        assert place.client.get(path).json()["data"]
        assert place.client.get(path, headers=BOB).json()["data"] == []
    for path, body in ((f"/v1/batches/{id_}/cancel", None), ("/v1/batches", batch_of(file_id))):
        assert place.client.post(path, json=body, headers=BOB).status_code == 404
    assert place.client.delete(f"/v1/files/{file_id}", headers=BOB).status_code == 404
    assert place.client.get("/v1/files/..%2Fkeys%2Falice").status_code == 404
    assert place.client.get("/v1/files/file-0").status_code == 404


def test_fields_of_a_batch(place: Place) -> None:
    id_ = place.upload([line("a")]).json()["id"]
    for changes in (
        {"endpoint": "/v1/images/generations"}, {"completion_window": "soon"},
        {"metadata": {"a": 1}}, {"input_file_id": 1},
    ):  # fmt: skip
        refused = place.client.post("/v1/batches", json=batch_of(id_, **changes))
        assert refused.status_code == 400
        assert next(iter(changes)) in refused.json()["error"]["param"]
    made = place.client.post("/v1/batches", json=batch_of(id_, completion_window="90m")).json()
    assert made["expires_at"] - made["created_at"] == 5400
    assert place.client.post("/v1/batches", json=batch_of(id_, metadata=None)).status_code == 200


def test_without_a_folder() -> None:
    client = TestClient(make_app(Checks(), FixedKeys({}), services=[BatchService(None)]))  # type: ignore[arg-type]
    for method, path in (("GET", "/v1/files"), ("GET", "/v1/batches/x"), ("POST", "/v1/files")):
        refused = client.request(method, path)
        assert refused.status_code == 404
        assert "--batches FOLDER" in refused.json()["error"]["message"]
    refused = client.post("/v1/batches", json=batch_of("x"))
    assert "--batches FOLDER" in refused.json()["error"]["message"]


def test_the_thread_ends_with_a_gateway_that_is_stopped_by_force(place: Place) -> None:
    async def main() -> None:
        async def serve() -> None:
            async with batch_work.working(place.folder, place.url):
                await asyncio.Event().wait()

        serving = asyncio.create_task(serve())
        await asyncio.sleep(0)
        assert threading.active_count() == before + 1
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)

    before = threading.active_count()
    asyncio.run(main())
    assert threading.active_count() == before


def test_a_passing_fault_of_the_machine_ends_nothing(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = iter([OSError(24, "Too many open files")])
    glob = Path.glob

    def failing(path: Path, pattern: str) -> Iterator[Path]:
        if path == place.folder.work and (fault := next(faults, None)):
            raise fault
        return glob(path, pattern)

    monkeypatch.setattr(Path, "glob", failing)
    id_ = place.make([line("a")])
    place.work.start()
    try:
        wait_until(lambda: place.see(id_)["status"] == "completed")
    finally:
        place.work.stop()
    assert next(faults, None) is None


def test_one_batch_holds_up_no_other(place: Place) -> None:
    """With the thread at work, and its own workers."""
    stuck, waits, done = (place.make([line("a", prompt=word)]) for word in ("b", "for ever", "b"))
    (place.folder.batches / f"{stuck}.json").write_bytes(b"{}")
    place.work.start()
    try:
        wait_until(lambda: place.see(done)["status"] == "completed")
        assert place.see(waits)["status"] == "in_progress"
    finally:
        place.work.stop()
    assert (place.folder.work / stuck).exists()
    assert all(worker.poll() is not None for worker in place.work._workers)
