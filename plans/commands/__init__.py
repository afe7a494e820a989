"""The commands `eagle3 plan` and `eagle3 build`: they parse options, call, and print.

Nothing is computed here. Packages that a light installation lacks are imported inside the
commands.
"""
