"""Evaluation of a trained head: its acceptance length, measured by decoding with it.

The teacher-forced agreement on held-out conversations is measured here too. `runtime/checks`
compares bundles without training data.
"""
