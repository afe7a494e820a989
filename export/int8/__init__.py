"""int8 targets: their numbers, the rounding of weights, the rewritten graph, the same in PyTorch.

What int8 means for a draft (blocks of weights) is in `export/graphs/weights.py`; how far an int8
target is from its original is measured in `export/checks/`.
"""
