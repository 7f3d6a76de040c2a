"""What a step needs on a GPU alone: kernels, buffers, graphs. Imported only when it is chosen."""
