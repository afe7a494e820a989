"""Draft engines: the heads as PyTorch modules, and the graphs traced or written from them.

The draft's step, its fusion of target features and the graph that grows a whole tree belong here.
Reading a head's checkpoint is in `export/heads`.
"""
