"""The settings of each training command: frozen dataclasses that validate themselves.

The defaults are defined here and the command line reads them from here, so these modules import
nothing heavy.
"""
