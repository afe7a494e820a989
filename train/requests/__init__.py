"""What each training command is asked for: frozen dataclasses, validated once.

Defaults live here and the command line reads them from here, so nothing heavy is imported.
"""
