"""`Plan`: the static shapes, tree budget and precision of a bundle, with their only defaults.

`eagle3 export` exports engines for one `Plan` and stores it in the bundle's manifest. The runtime
allocates its buffers from the plan, and a request may use a smaller or larger tree within its
limits (`Plan.override`). Plans and trees are immutable: another tree is a new object. Checks that
depend on the backend are in `backends.py`, a device's capabilities and costs in `device_spec.py`
and `roofline.py`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Any

from eagle3.plans.backends import (
    PADDED_BACKENDS,
    TENSORRT_BACKENDS,
    check_compute_capability,
    widths_of,
    widths_up_to,
)
from eagle3.plans.checked_fields import check_choice, exact_fields, set_int
from eagle3.plans.tree_plan import MAX_DRAFT_TOKENS, TreePlan, TreeRequest, requested_tree
from eagle3.runtime.errors import PlanError

DTYPES = ("float32", "float16", "bfloat16")
ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
TARGET_WEIGHTS = ("same", "int8")
DRAFT_WEIGHTS = ("same", "int8")
KV_DTYPES = ("same", *DTYPES)
LOWERINGS = ("ort", "portable")
BACKENDS = ("ort-cpu", "ort-cuda", "tensorrt", "tensorrt-rtx")

MAX_BATCH = 1024
MAX_SEQ_LEN = 1 << 20
MAX_WORKSPACE_BYTES = 1 << 40
_DRAFT_ROWS_PER_TOKEN = 4


@dataclass(frozen=True)
class Plan:
    """Static shapes, tree and precision of a bundle.

    Raises PlanError if a field is invalid or two fields contradict each other.
    """

    max_seq_len: int = 2048
    """S: maximum number of tokens in the cache, prompt plus generated."""
    prefill_chunk: int = 128
    """Maximum number of prompt tokens in one target call."""
    max_draft_tokens: int = 64
    """Size of the largest tree that a request may use, root excluded."""
    tree: TreePlan = field(default_factory=TreePlan)
    """Default tree of a request."""
    dtype: str = "float32"
    """Data type of the target's weights, of activations and of both KV caches."""
    draft_weights: str = "same"
    """Storage of the draft head's matrices: "same" for `dtype`, or "int8" with scales."""
    lowering: str = "ort"
    """How attention is written in the graphs: "ort" for ONNX Runtime's own operators, "portable"
    for standard ONNX operators."""
    backend: str = "ort-cpu"
    """Library that runs the engines."""
    batch: int = 1
    """B: number of sequences in one call."""
    verify_widths: tuple[int, ...] = ()
    """Row counts of a verification, ascending. A call is padded to the next of these, so that every
    call has one of a few fixed shapes. Empty: `resolved` chooses them for the backend; ort-cpu does
    not pad."""
    target_weights: str = "same"
    """Storage of the target's matrices; the values are those of `draft_weights`."""
    kv_dtype: str = "same"
    """Data type of both KV caches; "same" means `dtype`."""
    compute_capability: str | None = None
    """Compute capability of the GPU that plan files are built for, such as "8.9". None: that of the
    machine that builds them."""
    workspace_bytes: int | None = None
    """Limit of TensorRT's scratch memory in bytes; None: no limit."""

    def __post_init__(self) -> None:
        set_int(self, "batch", MAX_BATCH)
        set_int(self, "max_seq_len", MAX_SEQ_LEN, low=2)
        set_int(self, "prefill_chunk", self.max_seq_len, "max_seq_len")
        # One target call holds the root and the whole tree, and all of them must fit the cache.
        set_int(self, "max_draft_tokens", MAX_DRAFT_TOKENS)
        set_int(self, "max_draft_tokens", self.max_seq_len - 1, "max_seq_len - 1")
        _check_tree(self.tree, self.max_draft_tokens)
        check_choice("dtype", self.dtype, DTYPES)
        check_choice("target_weights", self.target_weights, TARGET_WEIGHTS)
        check_choice("draft_weights", self.draft_weights, DRAFT_WEIGHTS)
        check_choice("kv_dtype", self.kv_dtype, KV_DTYPES)
        check_choice("lowering", self.lowering, LOWERINGS)
        check_choice("backend", self.backend, BACKENDS)
        if self.workspace_bytes is not None:
            set_int(self, "workspace_bytes", MAX_WORKSPACE_BYTES)
        check_compute_capability(self.compute_capability)
        widths = widths_of(self.verify_widths, self.max_draft_tokens + 1, self.max_seq_len)
        object.__setattr__(self, "verify_widths", widths)
        _check_backend(self)

    @property
    def cache_capacity(self) -> int:
        """Number of slots of the target's cache.

        The one slot beyond max_seq_len is scratch space: in the `ort` lowering, a call of one row
        gets a second row inside the graph. Its output is dropped, but its key and value are written
        to the slot behind the first row's.
        """
        return self.max_seq_len + 1

    @property
    def max_draft_rows(self) -> int:
        """Maximum number of tree rows that the draft runs in one round.

        The draft's cache has this many slots behind the committed rows.
        """
        return _DRAFT_ROWS_PER_TOKEN * self.max_draft_tokens

    @property
    def draft_capacity(self) -> int:
        """Number of slots of the draft's cache."""
        return self.max_seq_len + self.max_draft_rows

    @property
    def unbuilt(self) -> tuple[str, ...]:
        """Reasons why this plan cannot be built or run yet; empty if it can.

        Memory and cost of an unbuilt plan can still be estimated.
        """
        return _unbuilt_reasons(self)

    def resolved(self) -> Plan:
        """Return the plan as it is built: explicit `kv_dtype`, and `verify_widths` filled in.

        The widths stay empty for a backend that does not pad.
        """
        widths = self.verify_widths
        if not widths and self.backend in PADDED_BACKENDS:
            widths = widths_up_to(self.max_draft_tokens + 1)
        dtype = self.dtype if self.kv_dtype == "same" else self.kv_dtype
        return replace(self, verify_widths=widths, kv_dtype=dtype)

    def require_built(self) -> None:
        """Raise PlanError, with the reasons, if this plan cannot be built or run yet."""
        if self.unbuilt:
            raise PlanError("; ".join(self.unbuilt))

    def override(
        self,
        draft_top_k: int | None = None,
        draft_depth: int | None = None,
        num_draft_tokens: int | None = None,
        tree: TreeRequest | None = None,
    ) -> TreePlan:
        """Return the tree of one request: this plan's tree with the given fields replaced.

        tree: use this tree instead of the plan's; "dynamic" keeps the plan's sizes. The other
        arguments replace its sizes. Raises PlanError, with the field and both numbers, if the
        engines cannot verify the tree.
        """
        asked: dict[str, Any] = {
            "draft_top_k": draft_top_k,
            "draft_depth": draft_depth,
            "num_draft_tokens": num_draft_tokens,
        }
        base = self.tree if tree is None else requested_tree(tree, self.tree)
        found = replace(base, **{k: v for k, v in asked.items() if v is not None})
        _check_tree(found, self.max_draft_tokens)
        return found

    def to_json(self) -> dict[str, Any]:
        """Return the fields as a JSON object; `tree` is a nested object."""
        return {**asdict(self), "verify_widths": list(self.verify_widths)}

    @classmethod
    def from_json(cls, data: object) -> Plan:
        """Return the plan of a bundle from the object that `to_json` returned.

        Raises PlanError if a field is missing, unknown or invalid, or if the plan cannot be built.
        """
        values = exact_fields(cls, data, "plan")
        plan = cls(**{**values, "tree": TreePlan.from_json(values["tree"])})
        plan.require_built()
        return plan


def _check_tree(tree: TreePlan, max_draft_tokens: int) -> None:
    if not isinstance(tree, TreePlan):
        raise PlanError(f"tree must be a TreePlan, got {tree!r}")
    if tree.num_draft_tokens > max_draft_tokens:
        raise PlanError(
            f"num_draft_tokens is {tree.num_draft_tokens}, but the plan's max_draft_tokens is"
            f" {max_draft_tokens}: lower num_draft_tokens to {max_draft_tokens} or less,"
            " or export with a larger max_draft_tokens"
        )
    limit = _DRAFT_ROWS_PER_TOKEN * max_draft_tokens
    if tree.num_draft_rows > limit:
        raise PlanError(
            f"a tree with draft_top_k {tree.draft_top_k} and draft_depth {tree.draft_depth} runs"
            f" {tree.num_draft_rows} draft rows per round, but max_draft_tokens {max_draft_tokens}"
            f" leaves room for {limit}: lower draft_top_k or draft_depth, or export with a larger"
            " max_draft_tokens"
        )


def _check_backend(plan: Plan) -> None:
    """Raise PlanError, with both fields, for a combination that a backend can never support."""
    backend = plan.backend
    # ONNX Runtime's CPU provider has no bfloat16 MatMul: such a graph fails to load.
    if backend == "ort-cpu" and plan.dtype == "bfloat16":
        raise PlanError("dtype bfloat16 is not supported by backend ort-cpu: use float32")
    if backend not in PADDED_BACKENDS and plan.verify_widths:
        raise PlanError(
            f"verify_widths is {list(plan.verify_widths)}, but backend {backend} does not pad: a"
            " call has as many rows as its tree. Leave verify_widths empty"
        )
    if backend in PADDED_BACKENDS and plan.lowering != "portable":
        raise PlanError(
            f"lowering {plan.lowering} is not supported by backend {backend}, which has no"
            " operator for its attention: use lowering portable"
        )
    if backend == "ort-cuda" and plan.draft_weights == "int8":
        raise PlanError(
            "draft_weights int8 is not supported by backend ort-cuda, which has no kernel for"
            f" blockwise int8: use same, or backend {' or '.join(TENSORRT_BACKENDS)}"
        )
    if backend in TENSORRT_BACKENDS:
        return
    for name in ("compute_capability", "workspace_bytes"):
        value = getattr(plan, name)
        if value is not None:
            raise PlanError(
                f"{name} is {value}, but backend {backend} builds no plan files: remove {name},"
                f" or use backend {' or '.join(TENSORRT_BACKENDS)}"
            )


def _unbuilt_reasons(plan: Plan) -> tuple[str, ...]:
    """Return one message for each value that export and runtime do not implement yet."""
    reasons = []
    if plan.batch > 1:
        reasons.append(
            f"batch is {plan.batch}, but every backend drafts for one sequence per call: use"
            " batch 1, which also serves batched decoding without a draft (ort/batch_engine.py)"
        )
    if plan.target_weights != "same" and not is_int8_built(plan):
        reasons.append(
            f"target_weights is {plan.target_weights}, which needs backend ort-cpu, lowering ort"
            f" and dtype float32, not {plan.backend}, {plan.lowering} and {plan.dtype}: use same"
        )
    if plan.kv_dtype not in ("same", plan.dtype):
        reasons.append(
            f"kv_dtype is {plan.kv_dtype}, but KV caches must have the dtype of the activations,"
            f" {plan.dtype}: use same"
        )
    return tuple(reasons)


def is_int8_built(plan: Plan) -> bool:
    """Return whether the plan's backend runs int8 target weights."""
    return (plan.backend, plan.lowering, plan.dtype) == ("ort-cpu", "ort", "float32")
