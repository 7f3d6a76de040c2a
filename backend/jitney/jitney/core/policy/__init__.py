"""What may shape a step beside rank and token budget: tiers, drafts, and what a step costs.

- ``seam``: the questions that scheduler and planner ask, as Protocols.
- ``choose``: reads the options, and makes the objects that answer.
- ``plain``: answers without options; ``tiers``, ``seconds_limit`` and ``tier_limits``: for the
  option ``tiers``; ``speculation``, ``asking`` and ``prices``: for the option ``speculation``.
- ``queue_limit``, ``running_counts``, ``making_way``: what admission with tiers and without has in
  common. ``making_way`` also answers for the option ``priority_preempts``.
- ``cost``, ``least_squares``: estimate how long a step takes.
- ``drafters``: propose tokens.
- ``draft_budget``: cuts drafts down to what the rest of a step can spare, and allocates blocks for
  them. The planner calls it directly.

A policy knows requests and blocks, but neither the scheduler nor the planner.
"""
