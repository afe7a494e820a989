"""EAGLE-3 heads of SpecForge: the official layout, with what EAGLE-3.1 added.

They may carry an embedding, a copy of the target's, and `fc_norm`. `norm_output` has had two
meanings there, so that it is never read without the user's word.
"""

from dataclasses import replace

from eagle3.export.heads.dialects.official import OFFICIAL

SPECFORGE = replace(
    OFFICIAL,
    name="specforge",
    ambiguous={
        "norm_output": "older versions of SpecForge meant the norm in front of lm_head, newer ones "
        "mean what is fed back. Say --assume norm_output=true for a hidden fed back after the "
        "norm (EAGLE-3.1), --assume norm_output=false for one fed back before it"
    },
)
ARCHITECTURE = "LlamaForCausalLMEagle3"
