"""The bundle on disk: its folder, its manifest, and what they say about the model.

What reads, checks, writes or describes `manifest.json` and the files it lists belongs here.
Loading engines is `runtime/ort` and `runtime/gpu`; compiling plan files is `plans/tensorrt`.
"""
