"""Engines on ONNX Runtime's CPU provider: sessions, KV caches, target, drafts, batches.

A file here knows the tensors of one graph and the buffers it is bound to. What to propose is
decided in `runtime/drafters`, what to keep in `runtime/acceptance`.
"""
