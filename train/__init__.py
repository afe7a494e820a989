"""Trains draft heads: data from the target, training-time test, evaluation by decoding.

Needs torch. Each stage has a room below; this folder has no code of its own.
"""
