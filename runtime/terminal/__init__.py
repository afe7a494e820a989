"""What only the command line needs: options, console output, the chat loop.

A service that embeds the runtime imports nothing from this room. The commands themselves are in
`cli.py` and in the `commands` room of each stage.
"""
