"""Rounds on an NVIDIA GPU: TensorRT plans, CUDA graphs and a few kernels, without torch."""
