"""What the server's stub imports: the whole backend stands in the package beside this file."""

from jitney.frontend.model import TritonPythonModel as TritonPythonModel
