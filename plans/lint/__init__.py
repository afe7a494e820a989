"""Checks of ONNX graphs before a GPU library reads them.

Each file refuses what one library would get wrong or slow without an error. They read graphs only;
building is in `plans/tensorrt`.
"""
