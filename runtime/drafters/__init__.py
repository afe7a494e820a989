"""Drafters: one file for each way to propose a tree, and their registry.

A drafter turns committed tokens and features into a `Tree`. The engines it calls are in
`runtime/ort`, and the builders that grow trees are in `runtime/trees`.
"""
