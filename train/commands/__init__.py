"""The commands `eagle3 train ...`.

They only parse options, call a stage and print. torch is imported inside the commands, so that
`--help` works without it.
"""
