"""Engines on ONNX Runtime's CPU provider: sessions, KV caches, target, drafts, batches.

Each engine module handles the tensors of one graph and the buffers that are bound to it.
`runtime/drafters` decides what to propose, and `runtime/acceptance` decides what to keep.
"""
