"""What the server's stubs could not be started with is linked, or refused."""

import tempfile
from pathlib import Path

import pytest
from jitney.errors import InvalidArgumentError
from jitney_server.leftovers import RunFolder
from jitney_server.plain_paths import is_plain, make_runtime_folder, plain_path
from jitney_server.server import TritonServer


@pytest.mark.parametrize("name", ["a b", "m\u00fcll", "a;b", "$HOME", "it's", "(1)", "a&b", "*"])
def test_a_repository_is_reached_through_a_link(tmp_path: Path, name: str) -> None:
    repository = tmp_path / name
    repository.mkdir()
    (repository / "chat").mkdir()
    found = plain_path(repository, tmp_path / "models")
    assert is_plain(found)
    assert (found / "chat").is_dir()


def test_a_plain_repository_stays_as_it_is(tmp_path: Path) -> None:
    assert plain_path(tmp_path, tmp_path / "models") == tmp_path
    assert not (tmp_path / "models").exists()


@pytest.mark.parametrize("name", ["a b", "m\u00fcll"])
def test_the_folder_of_links_has_a_plain_path(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary = tmp_path / name
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    folder = make_runtime_folder("jitney-test-")
    folder.rmdir()
    assert is_plain(folder)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = make_runtime_folder("jitney-test-")
    assert folder.parent == tmp_path


@pytest.mark.parametrize("name", ["my chat", "m\u00fcll", "a;b"])
def test_a_model_whose_name_cannot_be_served_is_refused_at_once(tmp_path: Path, name: str) -> None:
    add_model(tmp_path, name, 'name: "x" # of a test\nbackend: "python"')
    add_model(tmp_path, ".not a model", 'backend: "python"')
    add_model(tmp_path, "plain", 'backend: "python"')
    with pytest.raises(InvalidArgumentError) as raised:
        TritonServer(tmp_path)
    assert repr(name) in str(raised.value)
    TritonServer(tmp_path, models=["plain"])


def test_the_others_are_served_if_it_is_to_keep_going(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository = tmp_path / "models"
    repository.mkdir()
    add_model(repository, "my chat", 'backend: "jitney"')
    add_model(repository, "plain", 'backend: "jitney"')
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    server = TritonServer(repository, keep_going=True)
    assert loaded_models(server) == ["plain"]
    assert list(server.unservable()) == ["my chat"]


@pytest.mark.parametrize(
    ("config", "has_stub"),
    [
        ('# backend: "python"\nplatform: "ensemble"', False),
        ('backend: "identity"', False),
        ("backend: 'onnxruntime'", True),
        ('platform: "tensorrt_plan"', True),
        ("max_batch_size: 8", True),
        (None, False),
    ],
)
def test_only_a_model_with_a_stub_needs_a_plain_name(
    tmp_path: Path, config: str | None, has_stub: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository = tmp_path / "models"
    repository.mkdir()
    add_model(repository, "my model", config)
    if has_stub:
        with pytest.raises(InvalidArgumentError):
            TritonServer(repository)
        return
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert loaded_models(TritonServer(repository)) == ["*"]


def test_without_a_configuration_the_file_tells(tmp_path: Path) -> None:
    add_model(tmp_path, "my model", None)
    (tmp_path / "my model" / "1").mkdir()
    (tmp_path / "my model" / "1" / "model.onnx").touch()
    with pytest.raises(InvalidArgumentError):
        TritonServer(tmp_path)


def add_model(repository: Path, name: str, config: str | None) -> None:
    folder = repository / name
    folder.mkdir()
    if config is not None:
        (folder / "config.pbtxt").write_text(config, encoding="utf-8")


def loaded_models(server: TritonServer) -> list[str]:
    option = "--load-model="
    command = server._command(RunFolder())
    return [word.removeprefix(option) for word in command if word.startswith(option)]


def test_the_server_gets_the_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repository = tmp_path / "a b"
    repository.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    runtime = RunFolder()
    command = TritonServer(repository)._command(runtime)
    link = runtime.path / "models"
    assert f"--model-repository={link}" in command
    assert link.resolve() == repository
