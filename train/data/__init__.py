"""Creation of training data: from prompts to conversations written by the target.

This folder reads prompts, renders them, answers them and packs the conversations. The packed form
that training reads is in `train/batches`.
"""
