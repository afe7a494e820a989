"""Checks that a user runs: whether a bundle is lossless, and what a machine can run.

This package holds `eagle3 verify` with its statistical tests, and `eagle3 doctor`. Both use the
public API of the engine. The self-check of an export, which compares engines with PyTorch, is in
`export/checks`.
"""
