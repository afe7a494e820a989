"""Checks that a user runs: losslessness of a bundle, and what a machine can run.

`verify`, its statistical tests and `doctor` belong here; they use the engine as any caller does.
The self-check of an export, which compares engines with PyTorch, is in `export/checks`.
"""
