"""EAGLE-3 heads as published by the method's authors: a flat Llama configuration.

They have a `midlayer`, their own `norm` and `lm_head`, offsets `d2t`, and no embedding. The ids in
`eagle_config` count layer outputs. The training configuration contains no rope_theta: 10000.
"""

from eagle3.export.heads.dialects.dialect import AUX_LAYERS_KEY, Dialect

# Switches that some exporters write into eagle_config.
EAGLE_KEYS = frozenset({AUX_LAYERS_KEY, "norm_before_fc", "fc_norm", "norm_output"})

OFFICIAL = Dialect(
    name="eagle3-official", method="eagle3", layer_ids="outputs", eagle_keys=EAGLE_KEYS
)
