"""The commands `eagle3 train ...`: they parse options, call a stage, and print.

torch is imported inside the commands, so that `--help` works without it.
"""
