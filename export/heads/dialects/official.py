"""EAGLE-3 heads as the method's authors publish them: a flat Llama configuration.

A `midlayer`, an own `norm` and `lm_head`, offsets `d2t`; no embedding. The ids in `eagle_config`
count layer outputs. The training configuration names no rope_theta: 10000.
"""

from eagle3.export.heads.dialects.dialect import AUX_LAYERS_KEY, Dialect

# The switches that some exporters write into eagle_config.
EAGLE_KEYS = frozenset({AUX_LAYERS_KEY, "norm_before_fc", "fc_norm", "norm_output"})

OFFICIAL = Dialect(
    name="eagle3-official", method="eagle3", layer_ids="outputs", eagle_keys=EAGLE_KEYS
)
