"""Helpers of the command line: shared options, console output and the chat loop.

A service that embeds the runtime does not need this package. The commands themselves are in
`cli.py` and in the `commands` package of each stage.
"""
