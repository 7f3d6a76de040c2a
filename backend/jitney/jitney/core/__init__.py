"""The paged KV manager and the scheduler, in pure Python: no torch, no clock, no randomness.

In the order in which they are read:

- ``request``: a request and its sequences.
- ``kv_cache``: blocks.
- ``live``: who waits, runs and has ended.
- ``plan``: how a step is filled.
- ``outcome``: what its output does.
- ``scheduler``: what the engine calls.
- ``policy``: what tiers and drafts change of that.

There are no phases. A sequence has ``num_tokens`` tokens, of which ``num_computed`` are in the
cache; a step gives each sequence some more under one token budget. Running sequences come first,
then waiting ones by rank, ``priority * aging_s + arrival``, the lowest first. A rank never changes,
and whoever comes later ranks higher, so none starves.

At most ``max_num_seqs`` sequences run, and never more than the budget has tokens. A prompt of n > 1
counts as n of them while it is computed. Those of its forks that would be too many wait in the
queue by their rank, and compute what the prefix cache lacks. So a step's work is bounded by
``max_num_seqs`` and one request's n, whatever is queued.

When no block is free, the running sequence of the highest rank is preempted: its blocks are freed
tail first, it goes back to the queue, and is computed again over prompt *and* output, with whatever
prefix is still cached. ``check_integrity()`` states the invariants. It is production code: the
stateful test calls it after every rule, the engine when it is idle.
"""
