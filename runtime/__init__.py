"""Runs a bundle: numpy and an engine package, never torch, transformers or `eagle3.export`."""
