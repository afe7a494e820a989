"""Compiles a bundle's graphs into TensorRT plan files, and says which of them may be used.

Requests, profiles, the build itself and the files in a bundle belong here. Running a plan file is
in `runtime/gpu/tensorrt_engine.py`.
"""
