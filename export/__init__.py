"""From checkpoints to a bundle: trace, lower, check against PyTorch, publish.

Needs torch and transformers, which the runtime never imports. The files in this folder are the
stage itself (export, add a draft, publish); each step has a room below.
"""
