"""What every long-running stage needs: journals, locks, processes, progress lines.

Nothing here knows conversations, features or weights.
"""
