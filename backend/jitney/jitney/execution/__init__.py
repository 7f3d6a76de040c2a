"""Everything that touches a device: checkpoints, attention, sampling and the model runner."""
