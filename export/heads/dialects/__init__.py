"""The dialects of draft head checkpoints: where each keeps its values, and its defaults.

A file holds what is special to one dialect, as data. Deciding which dialect a checkpoint has, and
resolving its values, is in `export/heads`.
"""
