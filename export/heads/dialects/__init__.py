"""The dialects of draft head checkpoints: where each keeps its values, and its defaults.

A file per dialect holds what is special to it, as data; `dialect.py` and `fields.py` are shared.
Deciding which dialect a checkpoint has, and resolving its values, is in `export/heads`.
"""
