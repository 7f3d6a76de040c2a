"""The built wheel carries the backend folders, and an installed jitney finds them."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = [
    "backend/jitney/jitney",
    "server/jitney_server",
    "gateway/jitney_gateway",
    "jobs/jitney_jobs",
    "measure/jitney_measure",
]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (built,) = folder.glob("*.whl")
    return built


def run_installed(wheel: Path, tmp_path: Path, code: str) -> str:
    """Run ``code`` where the unpacked wheel hides the checkout's package."""
    site = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={"PYTHONPATH": str(site), "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_wheel_holds_the_package_and_the_backend_folders(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    assert wheel.name.startswith("triton_jitney-")
    for package in PACKAGES:
        folder = ROOT / package
        checkout = {str(path.relative_to(folder.parent)) for path in folder.rglob("*.py")}
        assert checkout, package
        assert checkout <= names
    assert "jitney_measure/pages/page.html" in names
    for backend in ("jitney", "onnxruntime", "tensorrt"):
        assert f"jitney_backends/{backend}/model.py" in names
    tops = {name.split("/")[0] for name in names}
    information = wheel.name.removesuffix("-py3-none-any.whl") + ".dist-info"
    ours = {Path(package).name for package in PACKAGES}
    assert tops == {*ours, "jitney_backends", information}
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_wheel_declares_its_command_and_extras(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    (entry,) = (name for name in archive.namelist() if name.endswith("entry_points.txt"))
    declared = archive.read(entry).decode()
    assert "jitney = jitney.cli:main" in declared
    for group in ("commands", "accelerators", "ahead", "gateway_services"):
        assert f"[jitney.{group}]\n" in declared
    (meta,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
    metadata = archive.read(meta).decode()
    for extra in ("server", "cpu", "gpu", "export", "bench", "dev"):
        assert f"Provides-Extra: {extra}\n" in metadata
    assert "Requires-Python: <3.13,>=3.11" in metadata
    assert "Requires-Dist: numpy<2,>=1.26; extra == 'server'" in metadata


def test_an_installed_wheel_finds_its_backends(wheel: Path, tmp_path: Path) -> None:
    code = (
        "import jitney, jitney_server.installation as i\n"
        "folder = i.backend_folder()\n"
        "print(folder)\n"
        "for name in ('jitney', 'onnxruntime', 'tensorrt'):\n"
        "    assert (folder / name / 'model.py').is_file()\n"
        "assert folder.parent == i.Path(jitney.__path__[0]).parent"
    )
    folder = run_installed(wheel, tmp_path, code)
    assert folder == str(tmp_path / "site" / "jitney_backends")


@pytest.mark.slow
@pytest.mark.server
def test_an_installed_wheel_serves(wheel: Path, tmp_path: Path) -> None:
    """The stub finds the unpacked package too."""
    code = "from jitney_server.trial import try_server\ntry_server()\nprint('ok')"
    assert run_installed(wheel, tmp_path, code) == "ok"
