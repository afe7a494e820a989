"""Runs a bundle: numpy and an engine package, never torch, transformers or `eagle3.export`.

The files in this folder are what a service embeds: the engine, its requests, parameters, results,
statistics and errors. Everything else has a room of its own below.
"""
