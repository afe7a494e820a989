"""Compile a bundle's graphs into TensorRT plan files, and find the ones that are usable.

This room holds build requests, optimization profiles, the build itself, and the plan files in a
bundle. `runtime/gpu/tensorrt_engine.py` runs a plan file.
"""
