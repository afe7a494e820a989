"""What may draft for a target: an EAGLE head or a small causal LM, as one interface.

A draft knows how to read, trace, describe and check itself. The graphs it is traced into are in
`export/draft_graphs`, the checks in `export/checks`.
"""
