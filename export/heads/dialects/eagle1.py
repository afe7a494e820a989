"""EAGLE-1 and EAGLE-2 heads, which are the same: `fc` over embedding and feature, then one layer.

There is no norm before the layer, and the lm_head is the target's. The only feature is the final
hidden state after the target's last norm.
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
