"""Trains draft heads: data from the target, training-time test, evaluation. Needs torch."""
