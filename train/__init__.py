"""Training of draft heads: data written by the target, training-time test, evaluation by decoding.

Requires torch. Each stage has its own folder below; this folder contains no code itself.
"""
