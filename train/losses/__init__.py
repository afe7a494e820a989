"""The training objective: the unrolled forward pass of a head and its losses.

Everything here is a pure function of batches and modules. The optimizer and the training loop are
in `train/loop`.
"""
