"""The command `eagle3 export`.

It only parses options, calls the export stage and prints. torch and transformers are imported
inside the command, so that `--help` works without them.
"""
