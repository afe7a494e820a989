"""What the trainer reads: packed tokens, target features, and the order of batches.

All of it is a function of the data folder and a seed. Making that data is in `train/data`.
"""
