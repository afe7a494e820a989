"""EAGLE-1 and EAGLE-2 heads, which are one: `fc` over embedding and feature, then one layer.

No norm in front of the layer, no lm_head: the target's. Its one feature is the final hidden after
the target's last norm.
"""

from eagle3.export.heads.dialects.dialect import AUX_LAYERS_KEY, Dialect

EAGLE1 = Dialect(
    name="eagle1-official",
    method="eagle1",
    layer_ids="outputs",
    head_keys=frozenset(
        {"bias", "qkv_bias", "draft_vocab_size", "tie_word_embeddings", AUX_LAYERS_KEY}
    ),
    eagle_keys=frozenset({AUX_LAYERS_KEY}),
)
