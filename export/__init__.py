"""Checkpoint -> bundle: ONNX graphs, weights, tokenizer, manifest. Needs torch and transformers."""
