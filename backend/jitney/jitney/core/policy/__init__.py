"""What may shape a step beside rank and token budget: tiers, drafts, and what a step costs.

``seam`` has the questions that scheduler and planner ask, as Protocols. ``plain`` answers them for
an engine without policies, ``tiers`` and ``tier_limits`` for the option ``tiers``, ``speculation``
for the option of its name. Both kinds of admission share ``queue_limit``, ``running_counts``, and
``making_way``, which also answers for ``priority_preempts``. ``cost`` and ``least_squares``
estimate what a step takes. ``drafters`` propose tokens. ``draft_budget`` cuts
drafts down to what the rest of a step can spare, and allocates blocks for them; the planner calls
it directly. ``choose`` reads the options and makes the objects that answer.

A policy knows requests and blocks, but neither the scheduler nor the planner.
"""
