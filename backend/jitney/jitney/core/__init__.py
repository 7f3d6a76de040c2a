"""The paged KV manager and the scheduler, in pure Python: no torch, no clock, no randomness."""
