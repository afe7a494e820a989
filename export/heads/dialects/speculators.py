"""EAGLE-3 heads of the speculators library: the layer's configuration is nested.

`layers.0` replaces `midlayer`; layer ids are hidden_states indices; the residual is the normed
hidden state unless the configuration says otherwise. A layer of model_type qwen3 norms its queries
and keys.
"""

from eagle3.export.heads.dialects.dialect import EAGLE3_KEYS, Dialect

SPECULATORS = Dialect(
    name="speculators",
    method="eagle3",
    layer_ids="inputs",
    norm_before_residual=True,
    nested=True,
    head_keys=EAGLE3_KEYS | {"embed_requires_grad", "speculators_version"},
    model_types=("llama", "qwen3"),
)
MODEL_TYPE = "eagle3"
