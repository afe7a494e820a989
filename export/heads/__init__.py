"""Draft head checkpoints: any of four dialects in, one fully resolved description out.

Every value has a source, and what is not understood is refused by name. What differs between the
dialects is in `dialects/`; the PyTorch modules are in `export/draft_graphs`.
"""
