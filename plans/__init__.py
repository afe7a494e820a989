"""What to build: static shapes, tree budget, precision, and what they cost on a device.

A plan, its presets, memory and latency estimates belong here and know nothing of a bundle. The
rooms below check graphs (`lint`), compile them (`tensorrt`) and hold the commands.
"""
