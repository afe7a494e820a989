"""Text to token ids and back: tokenizer, chat template, prompt files, streamed output.

No engine is known here. Whether a stop string has ended a request is decided in `runtime/rounds`;
this room only finds it in the text.
"""
