"""What Triton loads. The only package that imports ``triton_python_backend_utils``."""
