"""What may shape a step beside rank and token budget: tiers, drafts, and what a step costs.

``seam`` has the questions that scheduler and planner ask, as Protocols. ``plain`` answers them
without any policy, ``tiers``, ``pace`` and ``speculation`` by one. ``choose`` reads the options and
makes the objects that answer. A policy knows requests and blocks, but neither the scheduler nor the
planner.
"""
