"""Where the parts of the embedded server are on this machine, and whether they fit together.

The ``nvidia-pytriton`` wheel carries the real ``tritonserver`` binary, the python backend and one
stub per Python version; nothing of its Python API is used or imported. ``server`` starts what
:func:`find_installation` returns, and ``jitney doctor`` reports on the same checks one by one. A
check that fails raises InstallationError with a text that says how to repair it.
"""

import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from jitney.errors import InstallationError, install_extra

PYTHONS = ((3, 11), (3, 12))
"""Versions that have both a stub in the wheel and a numpy below 2."""

REPAIR_WITH = "repair it with: "
"""In the text of an InstallationError: the repair follows."""

_PYTHON = sysconfig.get_python_version()
"""Such as ``3.11``."""
_SYSTEM_FOLDERS = (
    "/usr/lib/{architecture}",  # as Debian names it, such as x86_64-linux-gnu
    "/lib/{architecture}",
    "/usr/local/lib",
    "/usr/lib64",
    "/lib64",
    "/usr/lib",
)

_INSTALL = install_extra("server")


@dataclass(frozen=True)
class ServerInstallation:
    """The parts of the server that are on this machine."""

    binary: Path
    stub: Path
    """Of the running Python version."""
    python_backend: Path
    """Folder of ``libtriton_python.so`` and ``triton_python_backend_utils.py``."""
    caches: Path
    """Folder of the server's response-cache implementations (``--cache-directory``)."""
    libraries: Path
    """Folder of the wheel's bundled shared libraries."""
    libpython: Path
    """The shared libpython that the stub embeds."""

    @property
    def library_path(self) -> str:
        """``LD_LIBRARY_PATH`` for the server: the stub inherits it and finds its libpython."""
        return f"{self.libpython.parent}:{self.libraries}"


def find_installation() -> ServerInstallation:
    """Find every part and check that they fit. Imports nothing of what it finds."""
    check_python()
    check_numpy()
    spec = importlib.util.find_spec("pytriton")  # does not import it
    if spec is None or not spec.submodule_search_locations:
        raise InstallationError(
            f"the embedded server is not installed (package nvidia-pytriton); "
            f"{REPAIR_WITH}{_INSTALL}"
        )
    package = Path(spec.submodule_search_locations[0])
    server = package / "tritonserver"
    found = ServerInstallation(
        binary=server / "bin" / "tritonserver",
        stub=server / "python_backend_stubs" / _PYTHON / "triton_python_backend_stub",
        python_backend=server / "backends" / "python",
        caches=server / "caches",
        libraries=package.parent / "nvidia_pytriton.libs",
        libpython=find_libpython(),
    )
    for part in (found.binary, found.stub, found.python_backend, found.caches, found.libraries):
        if not part.exists():
            raise InstallationError(
                f"the nvidia-pytriton package is incomplete: {part} is missing; "
                f"{REPAIR_WITH}pip install --force-reinstall --no-deps nvidia-pytriton==0.7.0"
            )
    return found


def check_python() -> None:
    """Raise InstallationError unless the running Python is one that the server can embed."""
    if sys.version_info[:2] not in PYTHONS:
        known = " or ".join(f"{major}.{minor}" for major, minor in PYTHONS)
        raise InstallationError(
            f"Python {sys.version_info.major}.{sys.version_info.minor} cannot run the embedded "
            f"server, which needs Python {known}: make the virtual environment with one of them"
        )


def check_numpy() -> None:
    """Raise InstallationError unless numpy is below 2: with numpy 2 the stub of this server answers
    with empty outputs and misreads inputs, without an error."""
    try:
        version = importlib.metadata.version("numpy")
    except importlib.metadata.PackageNotFoundError:
        raise InstallationError(f"numpy is missing; {REPAIR_WITH}{_INSTALL}") from None
    if int(version.split(".")[0]) >= 2:
        raise InstallationError(
            f"numpy {version} is installed, but the embedded server needs numpy below 2 (with "
            f"numpy 2 it answers with empty outputs); {REPAIR_WITH}pip install 'numpy>=1.26,<2'"
        )


def find_libpython() -> Path:
    """The shared libpython of the running version, which the stub embeds.

    It may be missing if Python was built without a shared library, and with Debian's Python, whose
    library is a package of its own.
    """
    name = f"libpython{_PYTHON}.so.1.0"
    folders = [
        sysconfig.get_config_var("LIBDIR") or "/usr/lib",
        f"{sys.base_prefix}/lib",
        f"{sys.prefix}/lib",
    ]
    architecture = sysconfig.get_config_var("MULTIARCH") or "x86_64-linux-gnu"
    for folder in _SYSTEM_FOLDERS:
        folders.append(folder.format(architecture=architecture))
    for folder in folders:
        library = Path(folder, name)
        if library.exists():
            return library
    raise InstallationError(
        f"{name} is missing: the server's stub embeds Python and needs its shared library; "
        f"{REPAIR_WITH}apt-get install libpython{_PYTHON} (Debian, Ubuntu), or without root by "
        f"putting that file into {Path(sys.prefix, 'lib')}, or with a Python built with "
        f"--enable-shared"
    )


def missing_libraries(program: Path, library_path: str) -> list[str]:
    """Names of the shared libraries that ``program`` would not find, as ``ldd`` tells."""
    environment = {**os.environ, "LD_LIBRARY_PATH": library_path}
    result = subprocess.run(
        ["ldd", str(program)], env=environment, capture_output=True, text=True, check=False
    )
    if result.returncode != 0:
        return [f"{program.name} itself ({result.stderr.strip() or 'ldd failed'})"]
    return [line.split()[0] for line in result.stdout.splitlines() if "not found" in line]


def backend_folder() -> Path:
    """The folder that holds our backends, one subfolder each.

    An installed wheel has a copy of it beside the packages. In a source checkout and an editable
    install it is the folder ``backend``.
    """
    package = Path(__file__).resolve().parent
    of_a_wheel = package.parent / "jitney_backends"
    of_a_checkout = package.parents[1] / "backend"
    for folder in (of_a_wheel, of_a_checkout):
        if (folder / "jitney" / "model.py").is_file():
            return folder
    raise InstallationError(
        f"the backend folders are missing beside {package}; "
        f"{REPAIR_WITH}`pip install --no-deps -e .` in Jitney's checkout"
    )


def link_backends(target: Path, installation: ServerInstallation, ours: Path) -> None:
    """Make ``target`` the server's folder of backends: the wheel's python backend, and those in the
    folder ``ours``."""
    # The server accepts a link to a whole backend folder, but not a link to a single library in
    # one. The folder ``python`` is put together from two folders of the wheel, so its files are
    # copied.
    python = target / "python"
    python.mkdir(parents=True)
    for name in ("libtriton_python.so", "triton_python_backend_utils.py"):
        shutil.copy(installation.python_backend / name, python)
    stub = Path(shutil.copy(installation.stub, python))
    stub.chmod(0o755)  # archives do not always keep the executable bit
    for backend in sorted(ours.iterdir()):
        if (backend / "model.py").is_file() or list(backend.glob("libtriton_*.so")):
            (target / backend.name).symlink_to(backend.resolve())
