"""The self-check of an export: finished engines against the PyTorch models they came from.

Also measures whether a head's checkpoint was read correctly. Checks that need no PyTorch run in
`runtime/checks`.
"""
