"""Helpers for every long-running stage: journals, locks, processes and progress lines.

Nothing here depends on conversations, features or weights.
"""
