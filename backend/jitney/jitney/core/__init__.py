"""The paged KV manager and the scheduler, in pure Python: no torch, no clock, no randomness.

In the order in which they are read:

- ``request``: a request and its sequences.
- ``kv_cache``: blocks.
- ``live``: who waits, runs and has ended.
- ``plan``: how a step is filled.
- ``outcome``: what its output does.
- ``scheduler``: what the engine calls.
- ``policy``: what tiers and drafts change of that.
"""
