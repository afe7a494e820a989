"""What is minimized: the unrolled forward of a head, and its losses.

Pure functions of batches and modules; the optimizer and the loop are in `train/loop`.
"""
