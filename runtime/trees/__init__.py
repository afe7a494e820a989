"""Draft trees: the frozen `Tree` that a round verifies, and the builders that grow one.

Pure numpy: a builder sees token ids and log-probabilities, never an engine. Which tree a bundle or
a request asks for is a `TreePlan`, in `plans/plan.py`.
"""
