"""What to build and how to run it: static shapes, tree budget, precision."""
