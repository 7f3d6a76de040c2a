"""The paged KV manager and the scheduler, in pure Python: no torch, no clock, no randomness.

In the order in which they are read:

- ``kv_cache``: blocks.
- ``request``: a request and its sequences; ``drafting``: what a sequence keeps for its drafts.
- ``needs``, ``deadlines``, ``held``: what a request may need, when it expires, and requests that
  wait for a resource.
- ``policy``: what tiers and drafts change in a step, behind one seam.
- ``planned_step``, ``live``, ``integrity``: the sequences that wait and run, the steps that
  compute them, and checks that these agree.
- ``step_plan``, ``plan``: how a step is filled.
- ``outcome``: what a step's output does to the sequences.
- ``taking_back``: requests that make way for one that needs the resource which they use.
- ``scheduler``: what the engine calls.

There are no phases. A sequence has ``num_tokens`` tokens, of which ``num_computed`` are in the
cache; a step gives each sequence some more under one token budget. What a sequence gets is a *row*
of the step's batch (``jitney.batch.Row``): tokens to compute, and what to sample after them. The
*host* is the processor that runs this code: it plans steps and applies their output. The *device*
computes them; it is a GPU, or the same processor.

Running sequences come first, then waiting ones. Both are ordered by rank, ``priority * aging_s +
arrival``, the lowest first. A rank never changes, and grows with the arrival. So in time every
sequence has the lowest rank, and none starves.

At most ``max_num_seqs`` sequences run, and never more than the budget has tokens: the lesser of the
two is ``max_running``. A request of n > 1 runs as one sequence until its prompt is computed, but
counts as n of them. Then it *forks* into n sequences: the row that ends its prompt samples the
first token of each. Forks that may not run yet wait in the queue by their rank. When such a fork is
admitted, it computes the part of the prompt that is no longer in the prefix cache.

Forks that running requests have yet to make are *due*. Nothing is admitted while

    running + forks due >= max_running

A request that is admitted while the sum is lower may bring it above ``max_running``. Then no other
is admitted, and some of its forks will wait. So only one request at a time can have such forks
(with tiers, one request of each tier). A step samples for at most ``max_running`` sequences, plus
the forks of that request.

When no block is free, the running sequence of the highest rank is preempted: its blocks are freed
tail first, it goes back to the queue, and is computed again over prompt *and* output, with whatever
prefix is still cached. ``check_integrity()`` states the invariants. It is production code: the
stateful test calls it after every rule, the engine when it is idle.
"""
