"""A bundle described as data and in words, for `eagle3 inspect`. No engine package is needed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from eagle3.plans.plan import ITEM_BYTES
from eagle3.plans.tree_plan import TreePlan
from eagle3.runtime.bundle.folder import Bundle
from eagle3.runtime.bundle.manifest import Convention, DraftInfo, engine_name

_METHODS = {"eagle3": "EAGLE-3 head", "eagle": "EAGLE-1/2 head", "model": "causal LM"}


def describe(
    bundle: Bundle, plan_files: Sequence[Mapping[str, Any]] = (), int8_form: str | None = None
) -> dict[str, Any]:
    """Return the manifest's facts as a JSON object, with sizes and caches in bytes.

    plan_files: its plan files, described by `plans/tensorrt/plan_file_text.py`. int8_form: how this
    machine runs an int8 target, "int8" or "uint8"; None: not known, or another target.
    """
    manifest = bundle.manifest
    data = manifest.to_json()
    return {
        "path": str(bundle.root),
        "size_bytes": size_bytes(bundle),
        "created_by": data["created_by"],
        "command": data["command"],
        "target": data["target"],
        "drafts": data["drafts"],
        "plan": data["plan"],
        "engines": engine_bytes(bundle),
        "caches": cache_bytes(bundle),
        "tokenizer": data["tokenizer"],
        "generation": data["generation"],
        "self_check": data["self_check"],
        "files": data["files"],
        "plan_files": list(plan_files),
        "int8_form": int8_form,
    }


def description_lines(
    bundle: Bundle, plan_files: Sequence[str] = (), int8_form: str | None = None
) -> list[str]:
    """Return the same in words, one fact per line."""
    manifest = bundle.manifest
    rows = [
        ("bundle", _size_text(bundle)),
        ("target", _target_text(bundle)),
        *_draft_rows(manifest.drafts),
        ("plan", _plan_text(bundle)),
        *(("engine", f"{name}: {as_text(n)}") for name, n in engine_bytes(bundle).items()),
        *(("cache", f"{name}: {as_text(n)}") for name, n in cache_bytes(bundle).items()),
        *(("plan file", each) for each in plan_files),
        ("tokenizer", _tokenizer_text(bundle)),
        *([] if int8_form is None else [("int8", int8_text(int8_form))]),
        *self_check_rows(bundle),
        ("made by", ", ".join(f"{k} {v}" for k, v in manifest.created_by.items())),
        ("command", manifest.command),
    ]
    return aligned(rows)


def int8_text(form: str) -> str:
    """Describe a form of `runtime/ort/int8_form.py`."""
    if form == "int8":
        return "weights are used as int8: integer products are exact on this CPU"
    return "weights are converted to uint8 at load: int8 products would saturate on this CPU"


def export_lines(bundle: Bundle) -> list[str]:
    """Return the lines printed after an export: location, size, and self-check."""
    return aligned([("bundle", _size_text(bundle)), *self_check_rows(bundle)])


def size_bytes(bundle: Bundle) -> int:
    """Return the total size of all files that the manifest lists."""
    return sum(info.size for info in bundle.manifest.files.values())


def engine_bytes(bundle: Bundle) -> dict[str, int]:
    """Return the size of graph and weights per engine. Shared weights count for their owner."""
    files = bundle.manifest.files
    return {
        name: sum(info.size for file, info in files.items() if file.startswith(engine.file))
        for name, engine in bundle.manifest.engines.items()
    }


def cache_bytes(bundle: Bundle) -> dict[str, int]:
    """Return the size of each KV cache, all layers, for one sequence of max_seq_len tokens."""
    plan, target = bundle.manifest.plan, bundle.manifest.target
    item = 2 * ITEM_BYTES[plan.dtype]
    caches = {
        "target": item
        * target.num_layers
        * target.num_kv_heads
        * target.head_dim
        * plan.cache_capacity
    }
    for name, draft in bundle.manifest.drafts.items():
        slot = draft.num_layers * draft.num_kv_heads * draft.head_dim
        caches[engine_name(name, "draft")] = item * slot * plan.draft_capacity
    return caches


def tree_text(tree: TreePlan) -> str:
    """Return a tree plan in words."""
    paths = tree.static_in_use
    if tree.static is not None and paths is not None:
        return (
            f"static, {tree.static.name or 'custom paths'}: up to {paths.top_k} children per node,"
            f" {paths.depth} levels, {paths.num_nodes} tokens verified"
        )
    if tree.draft_top_k == 1:
        return f"chain of {tree.depth_in_use} draft tokens per round"
    return (
        f"dynamic: top {tree.draft_top_k} per node, {tree.draft_depth} levels, best"
        f" {tree.num_draft_tokens} tokens verified"
    )


def as_text(size: int) -> str:
    """Return a number of bytes with a unit (1 MB = 10^6 bytes)."""
    for unit, factor in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if size >= factor:
            return f"{size / factor:.1f} {unit}"
    return f"{size} bytes"


def self_check_rows(bundle: Bundle) -> Iterator[tuple[str, str]]:
    """Yield the errors measured against PyTorch, and the acceptance of the first draft token."""
    drafts = {name: draft.checks for name, draft in bundle.manifest.drafts.items()}
    for name, check in {"target": bundle.manifest.self_check, **drafts}.items():
        if "skipped" in check:
            yield "self-check", f"{name} was not compared with PyTorch: {check['skipped']}"
        if "relative_errors" in check:
            yield "self-check", f"{name} against PyTorch: {_errors_text(check)}"
        if "quality" in check:
            yield "quality", _quality_text(check)
        if "first_position_acceptance" in check:
            share = check["first_position_acceptance"]
            yield (
                "self-check",
                f"{name}: first draft token accepted {share:.1%} of the time, greedy",
            )
        for reading, share in check.get("readings", {}).items():
            yield "", f"{name} read {reading}: {share:.1%} (teacher-forced)"


def _errors_text(check: Mapping[str, Any]) -> str:
    errors = ", ".join(f"{name} {value:.1e}" for name, value in check["relative_errors"].items())
    return f"relative errors {errors} (tolerance {check.get('tolerance', float('nan')):.0e})"


def _quality_text(check: Mapping[str, Any]) -> str:
    found, kept = check["quality"], check.get("not_quantized") or ["none"]
    return (
        f"int8 target against the original, {found['tokens']} tokens of text: KL divergence"
        f" {found['mean_kl']:.4f} nats per token (99%: {found['kl_99']:.3f}), same most likely"
        f" token at {found['top_1']:.1%} of positions, perplexity {found['perplexity']:.2f}"
        f" instead of {found['original_perplexity']:.2f}; matrices not in int8: {', '.join(kept)}"
    )


def _size_text(bundle: Bundle) -> str:
    return f"{bundle.root}: {as_text(size_bytes(bundle))} in {len(bundle.manifest.files)} files"


def _target_text(bundle: Bundle) -> str:
    target = bundle.manifest.target
    return (
        f"{target.architecture} from {target.source}: {target.num_layers} layers, hidden size"
        f" {target.hidden_size}, vocabulary {target.vocab_size}"
    )


def _draft_rows(drafts: Mapping[str, DraftInfo]) -> Iterator[tuple[str, str]]:
    if not drafts:
        yield "draft", "none: plain decoding, or --drafter lookup"
    for name, draft in drafts.items():
        stored = "as the plan's dtype" if draft.weights == "same" else draft.weights
        layers = "1 layer" if draft.num_layers == 1 else f"{draft.num_layers} layers"
        yield (
            "draft",
            f"{name}: {_METHODS.get(draft.method, draft.method)} ({draft.dialect}) from"
            f" {draft.source}, {layers}, draft vocabulary"
            f" {draft.draft_vocab_size}, weights {stored}",
        )
        for each, convention in draft.conventions.items():
            yield "", f"{each} = {_value_text(convention)} (from: {convention.source})"
        yield "tree", f"{name}: {tree_text(draft.tree)}"


def _value_text(convention: Convention) -> str:
    value = convention.value
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {item}" for key, item in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value))
    return str(value)


def _plan_text(bundle: Bundle) -> str:
    plan = bundle.manifest.plan
    weights = "" if plan.target_weights == "same" else f", target weights {plan.target_weights}"
    return (
        f"{plan.dtype}{weights}, {plan.lowering} lowering for {plan.backend}; context"
        f" {plan.max_seq_len} tokens, prefill {plan.prefill_chunk} at a time, trees up to"
        f" {plan.max_draft_tokens} tokens"
    )


def _tokenizer_text(bundle: Bundle) -> str:
    info = bundle.manifest.tokenizer
    template = "with a chat template" if info.chat_template else "no chat template: use --raw"
    eos = ", ".join(map(str, bundle.manifest.generation.eos_token_ids)) or "none"
    return f"{info.file}, {template}; ends at token {eos}"


def aligned(rows: list[tuple[str, str]]) -> list[str]:
    width = max(len(name) for name, _ in rows)
    return [f"{name:{width}}  {text}" for name, text in rows]
