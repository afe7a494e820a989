"""Rounds on an NVIDIA GPU: TensorRT plan files or ONNX Runtime's CUDA provider, without torch.

Device memory, CUDA graphs, the kernels between two engine calls and the rounds built from them
belong here. Building plan files does not need a GPU and is in `plans/tensorrt`.
"""
