"""The sizes of a bundle's target and head, for `eagle3 plan check`.

They come from the manifest alone, without torch. File sizes are exact; what the manifest does not
contain is derived, and `notes` name it.
"""

from __future__ import annotations

import re

from eagle3.plans.facts import Attention, DraftFacts, TargetFacts
from eagle3.plans.memory import matrix_bytes
from eagle3.plans.plan import ITEM_BYTES, Plan
from eagle3.runtime.bundle.folder import Bundle
from eagle3.runtime.bundle.manifest import DRAFT_ENGINES, HEAD_METHODS, TargetInfo, engine_name
from eagle3.runtime.errors import PlanError

# Mixtures of experts, by class name. The manifest does not contain the experts per token.
_MIXTURES = re.compile("moe|mixtral|gptoss|dbrx|jamba|llama4|deepseek", re.IGNORECASE)
_NOTES = (
    "the manifest does not contain whether lm_head is tied to the embedding: they are counted as"
    " one, so a call may read up to V * d weights less than estimated",
    "the MLP's width is derived from the number of weights, the number of heads from d / head_dim",
)
# Fields of a plan that are fixed at export.
_BAKED_IN = (
    "max_seq_len",
    "dtype",
    "lowering",
    "max_draft_tokens",
    "draft_weights",
    "target_weights",
)


def bundle_facts(bundle: Bundle) -> tuple[TargetFacts, DraftFacts | None]:
    """Return the facts of the target and of the first EAGLE head of a bundle.

    Raises PlanError for a mixture of experts, and if the bundle has drafts but no EAGLE head.
    """
    manifest = bundle.manifest
    info, item = manifest.target, float(ITEM_BYTES[manifest.plan.dtype])
    if manifest.plan.target_weights == "int8":
        item = 1 + item / info.hidden_size  # one scale per column
    if _MIXTURES.search(info.architecture):
        raise PlanError(
            f"{info.architecture} is a mixture of experts, and a manifest does not contain the"
            " experts per token: pass the checkpoint's folder or id instead of the bundle"
        )
    target = _target(info, round(_weight_bytes(bundle, "target") / item))
    if not manifest.drafts:
        return target, None
    heads = [name for name, each in manifest.drafts.items() if each.method in HEAD_METHODS]
    if not heads:
        raise PlanError(
            f"{bundle.root} has the drafts {', '.join(manifest.drafts)}, but only EAGLE heads can"
            " be estimated: pass the target's checkpoint instead of the bundle, without --draft"
        )
    return target, _draft(bundle, heads[0], target)


def differences(bundle: Bundle, plan: Plan) -> list[str]:
    """Return one sentence for each field of `plan` that the bundle was not exported with."""
    own = bundle.manifest.plan
    return [
        f"the bundle was exported with {name} {getattr(own, name)}, the plan has"
        f" {getattr(plan, name)}: this plan requires another export"
        for name in _BAKED_IN
        if getattr(own, name) != getattr(plan, name)
    ]


def _weight_bytes(bundle: Bundle, engine: str) -> int:
    """Return the size of an engine's weight file, without weights shared with another engine."""
    file = bundle.manifest.files.get(f"{bundle.manifest.engines[engine].file}.data")
    if file is None:
        raise PlanError(f"{bundle.root}: {engine} has no weight file")
    return file.size


def _target(info: TargetInfo, num_parameters: int) -> TargetFacts:
    table = info.vocab_size * info.hidden_size
    attention = _attention(info.num_layers, info.hidden_size, info.num_kv_heads, info.head_dim)
    layer_parameters = num_parameters - table
    return TargetFacts(
        name=info.source,
        num_parameters=num_parameters,
        layer_parameters=layer_parameters,
        vocab_size=info.vocab_size,
        hidden_size=info.hidden_size,
        intermediate_size=_mlp_width(
            layer_parameters // info.num_layers, info.hidden_size, _attention_rows(attention, 1)
        ),
        tied=True,
        attention=attention,
        max_position_embeddings=info.max_position_embeddings,
        notes=_NOTES,
    )


def _draft(bundle: Bundle, name: str, target: TargetFacts) -> DraftFacts:
    info = bundle.manifest.drafts[name]
    per_weight = matrix_bytes(1, info.weights, bundle.manifest.plan.dtype, info.hidden_size)
    fuses = "draft_fuse" in DRAFT_ENGINES[info.method]
    lm_head = info.draft_vocab_size * info.hidden_size
    # An EAGLE-1/2 head reads the target's lm_head, unless its own is stored differently.
    own_lm_head = fuses or info.weights != "same"
    stored = round(_weight_bytes(bundle, engine_name(name, "draft")) / per_weight)
    fused = 0
    if fuses:
        fused = round(_weight_bytes(bundle, engine_name(name, "draft_fuse")) / per_weight)
    step = stored - (lm_head if own_lm_head else 0)
    attention = _attention(1, info.hidden_size, info.num_kv_heads, info.head_dim)
    # q, k and v of an EAGLE-3 head read 2 d; an EAGLE-1/2 step also contains its fc [d,2d].
    rows = _attention_rows(attention, 2 if fuses else 1) + (0 if fuses else 2 * info.hidden_size)
    return DraftFacts(
        name=f"{info.method} head",
        fuse_parameters=fused,
        step_parameters=step,
        lm_head_parameters=lm_head,
        own_lm_head=own_lm_head,
        draft_vocab_size=info.draft_vocab_size,
        hidden_size=info.hidden_size,
        intermediate_size=_mlp_width(step, info.hidden_size, rows),
        feature_size=len(info.aux_layer_ids) * bundle.manifest.target.hidden_size,
        attention=attention,
    )


def _attention(num_layers: int, hidden_size: int, num_kv_heads: int, head_dim: int) -> Attention:
    return Attention(num_layers, max(1, hidden_size // head_dim), num_kv_heads, head_dim)


def _mlp_width(layer_parameters: int, hidden_size: int, other_rows: int) -> int:
    """Return the width of a gated MLP: the weights left by all other matrices [rows,d],
    over 3 d.
    """
    return max(1, (layer_parameters // hidden_size - other_rows) // 3)


def _attention_rows(attention: Attention, input_widths: int) -> int:
    """Return the rows [.,d] of q, k and v, which read `input_widths` times d, and of o."""
    queries, keys = attention.num_heads, attention.num_kv_heads
    return attention.head_dim * (input_widths * (queries + 2 * keys) + queries)
