"""Checks of ONNX graphs for the GPU libraries that will read them.

Each module rejects what one library would compute incorrectly or slowly without an error. The
modules only read graphs; compiling them is in `plans/tensorrt`.
"""
