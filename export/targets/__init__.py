"""The target model: loading a checkpoint, its traced graph, its sizes, its tokenizer files.

Anything that asks transformers about a target belongs here. Draft checkpoints are read in
`export/heads` and `export/drafts`.
"""
