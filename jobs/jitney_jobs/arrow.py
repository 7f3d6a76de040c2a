"""pyarrow, for all modules of jobs: where it is missing, each of them says how to install it."""

from jitney.errors import InstallationError, install_extra

try:
    import pyarrow as pa
    import pyarrow.fs as pafs
    import pyarrow.parquet as pq
except ImportError:
    raise InstallationError(
        f"jobs need pyarrow, which is not installed: {install_extra('jobs')}"
    ) from None

__all__ = ["pa", "pafs", "pq"]
