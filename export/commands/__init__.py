"""The command `eagle3 export`: it parses options, calls the stage, and prints.

torch and transformers are imported inside the command, so that `--help` works without them.
"""
