"""Makes training data: prompts in, conversations written by the target out.

Reading prompts, rendering, answering and packing belong here. The packed form that training reads
is in `train/batches`.
"""
