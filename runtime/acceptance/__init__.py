"""Acceptance: from the target's logits to the tokens that a round commits.

Warpers, random numbers and the strict rules (greedy, `coupled`, `rejection`) belong here; every
function is exact and pure. Running the target and committing tokens belong to `runtime/rounds`.
"""
