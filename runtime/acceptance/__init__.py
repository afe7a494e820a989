"""Acceptance: from the target's logits to the tokens that a round commits.

This package contains the warpers, the random numbers and the strict rules (greedy, `coupled`,
`rejection`). All rules are exact: the result is distributed like the target's own text.
`runtime/rounds` runs the target and commits the tokens.
"""
