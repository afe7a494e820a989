"""The trainer's input: packed tokens, target features and the order of batches.

All of it depends only on the data folder and a seed. `train/data` creates the data folder.
"""
