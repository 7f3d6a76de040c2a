"""pyarrow, for all modules of jobs: where it is missing, each of them says how to install it."""

from jitney.errors import InstallationError, install_extra

try:
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.csv as pa_csv
    import pyarrow.dataset as ds
    import pyarrow.fs as pafs
    import pyarrow.json as pa_json
    import pyarrow.parquet as pq
except ImportError:
    raise InstallationError(
        f"jobs need pyarrow, which is not installed: {install_extra('jobs')}"
    ) from None

__all__ = ["ds", "pa", "pa_csv", "pa_json", "pafs", "pc", "pq"]
