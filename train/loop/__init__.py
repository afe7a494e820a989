"""The training run: initial weights, optimizer steps, checkpoints, curves, the finished head.

A run can stop anywhere and continues to the same weights. Losses are in `train/losses`, batches in
`train/batches`.
"""
