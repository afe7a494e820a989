"""EAGLE-3 heads of SpecForge: the official layout with the additions of EAGLE-3.1.

They can contain an embedding (a copy of the target's) and `fc_norm`. `norm_output` has had two
meanings there, so it is never read without a decision of the user.
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
