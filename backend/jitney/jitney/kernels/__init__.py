"""What makes the execution faster: fused modules and kernels, for CPU and GPU."""
