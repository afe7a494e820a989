"""Draft trees: the frozen `Tree` that a round verifies, and the builders that grow one.

This package uses numpy only: a builder reads token ids and log-probabilities and calls no engine.
The size and kind of the tree come from a `TreePlan` (`plans/tree_plan.py`).
"""
