"""What a trained head is worth: acceptance measured by decoding with it.

Teacher-forced agreement on held-out conversations is measured here too. Comparing bundles without
training data is `runtime/checks`.
"""
