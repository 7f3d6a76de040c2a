"""What may shape a step beside rank and token budget: tiers, drafts, and what a step costs.

``seam`` has the questions that scheduler and planner ask, ``plain`` the answers without any policy,
and ``choose`` reads the options and picks who answers. A policy knows requests and blocks, but
neither the scheduler nor the planner.
"""
