"""Plans: static shapes, tree budget and precision of a bundle, and their cost on a device.

This room holds `Plan`, the device presets, and the memory and latency estimates; these modules do
not depend on bundles. The rooms below check ONNX graphs (`lint`), compile them to TensorRT plan
files (`tensorrt`) and define the commands (`commands`).
"""
