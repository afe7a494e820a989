"""The ONNX side of an export: tracing a module, lowering it, and laying out weights.

Nothing here knows a target from a draft; both are traced, lowered and stored by the same code. The
modules that are traced are in `export/targets` and `export/draft_graphs`.
"""
