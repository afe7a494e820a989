"""The round loop: propose, verify, accept, keep, commit, and when a request ends.

`decode.py` is the loop for every drafter and device, over the protocol in `protocol.py`; rounds
whose steps run on the host are here, rounds on a GPU are in `runtime/gpu`.
"""
