"""The commands `eagle3 plan` and `eagle3 build`.

They only parse options, call the functions that do the work, and print. Packages that a light
installation lacks are imported inside the commands.
"""
