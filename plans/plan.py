"""What to build: static shapes, tree budget, precision. The only place where defaults live.

`eagle3 export` compiles engines for one `Plan`, which the bundle's manifest then carries; the
runtime allocates its buffers from it, and a request may ask for a smaller or larger tree within
it (`Plan.override`). Neither object ever changes: another tree is a new object. What contradicts
itself is in `rules.py`, what a device has and costs in `device.py` and `roofline.py`.
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
    """Static shapes, tree and precision of a bundle. Raises PlanError for a contradiction."""

    max_seq_len: int = 2048
    """S: cache capacity in tokens, prompt plus generated."""
    prefill_chunk: int = 128
    """Prompt tokens in one target call."""
    max_draft_tokens: int = 64
    """The largest tree a request may ask for, root excluded."""
    tree: TreePlan = field(default_factory=TreePlan)
    """The tree a request gets when it does not ask for another."""
    dtype: str = "float32"
    """Target weights and activations, and both caches."""
    draft_weights: str = "same"
    """How the draft head's matrices are stored: as `dtype` says, or as int8 with scales."""
    lowering: str = "ort"
    """How attention is expressed in the graphs."""
    backend: str = "ort-cpu"
    """What runs the engines."""
    batch: int = 1
    """B: sequences in one call."""
    verify_widths: tuple[int, ...] = ()
    """Rows of a verification, ascending: a call is padded to the next of these, so that each is one
    fixed shape. Empty: chosen for the backend (`resolved`); ort-cpu pads nothing."""
    target_weights: str = "same"
    """How the target's matrices are stored, as `draft_weights`."""
    kv_dtype: str = "same"
    """Of both caches; "same" is `dtype`."""
    compute_capability: str | None = None
    """Of the GPU that plan files are for, as "8.9"; None: of the machine that builds them."""
    workspace_bytes: int | None = None
    """Scratch memory TensorRT may use; None: as much as it likes."""

    def __post_init__(self) -> None:
        set_int(self, "batch", MAX_BATCH)
        set_int(self, "max_seq_len", MAX_SEQ_LEN, low=2)
        set_int(self, "prefill_chunk", self.max_seq_len, "max_seq_len")
        # One target call holds the root and the tree, and all of it must fit the cache.
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
        """Slots of the target's cache: one more than tokens, which a call of one row may spoil."""
        return self.max_seq_len + 1

    @property
    def max_draft_rows(self) -> int:
        """Tree rows the draft may run in one round, its cache's room behind the committed rows."""
        return _DRAFT_ROWS_PER_TOKEN * self.max_draft_tokens

    @property
    def draft_capacity(self) -> int:
        """Slots of the draft's cache."""
        return self.max_seq_len + self.max_draft_rows

    @property
    def unbuilt(self) -> tuple[str, ...]:
        """Why nothing can build or run this plan yet, if so: it may only be reckoned with."""
        return _unbuilt_reasons(self)

    def resolved(self) -> Plan:
        """A plan without "same" and without widths left open: what it says is what is built."""
        widths = self.verify_widths
        if not widths and self.backend in PADDED_BACKENDS:
            widths = widths_up_to(self.max_draft_tokens + 1)
        dtype = self.dtype if self.kv_dtype == "same" else self.kv_dtype
        return replace(self, verify_widths=widths, kv_dtype=dtype)

    def require_built(self) -> None:
        """Raises PlanError, with the reasons, for a plan that nothing can build or run yet."""
        if self.unbuilt:
            raise PlanError("; ".join(self.unbuilt))

    def override(
        self,
        draft_top_k: int | None = None,
        draft_depth: int | None = None,
        num_draft_tokens: int | None = None,
        tree: TreeRequest | None = None,
    ) -> TreePlan:
        """The tree of one request: this plan's, with what the request names put in its place.

        tree: another one altogether; "dynamic" keeps the plan's sizes. Raises PlanError, naming the
        field and both numbers, for a tree the engines cannot verify.
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
        """The fields as a JSON object; `tree` is an object in it."""
        return {**asdict(self), "verify_widths": list(self.verify_widths)}

    @classmethod
    def from_json(cls, data: object) -> Plan:
        """The plan of something built: reads `to_json`'s object.

        Raises PlanError for a missing, unknown or wrong field, and for what nothing builds yet.
        """
        values = exact_fields(cls, data, "plan")
        plan = cls(**{**values, "tree": TreePlan.from_json(values["tree"])})
        plan.require_built()
        return plan


def _check_tree(tree: TreePlan, max_draft_tokens: int) -> None:
    if not isinstance(tree, TreePlan):
        raise PlanError(f"tree is {tree!r}: give a TreePlan")
    if tree.num_draft_tokens > max_draft_tokens:
        raise PlanError(
            f"num_draft_tokens is {tree.num_draft_tokens}, but the plan's max_draft_tokens is"
            f" {max_draft_tokens}: ask for at most {max_draft_tokens},"
            " or export with a larger max_draft_tokens"
        )
    limit = _DRAFT_ROWS_PER_TOKEN * max_draft_tokens
    if tree.num_draft_rows > limit:
        raise PlanError(
            f"a tree of draft_top_k {tree.draft_top_k} and draft_depth {tree.draft_depth} runs"
            f" {tree.num_draft_rows} draft rows a round, but max_draft_tokens {max_draft_tokens}"
            f" leaves room for {limit}: ask for less of either, or export with a larger"
            " max_draft_tokens"
        )


def _check_backend(plan: Plan) -> None:
    """Raises PlanError, naming both fields, for what a backend can never do."""
    backend = plan.backend
    # ONNX Runtime's CPU provider has no bfloat16 MatMul: such a graph fails to load.
    if backend == "ort-cpu" and plan.dtype == "bfloat16":
        raise PlanError("dtype is bfloat16, which backend ort-cpu cannot run: choose float32")
    if backend not in PADDED_BACKENDS and plan.verify_widths:
        raise PlanError(
            f"verify_widths is {list(plan.verify_widths)}, but backend {backend} pads nothing, a"
            " call has the rows of its tree: leave it empty"
        )
    if backend in PADDED_BACKENDS and plan.lowering != "portable":
        raise PlanError(
            f"lowering is {plan.lowering}, whose attention backend {backend} does not know:"
            " choose portable"
        )
    if backend == "ort-cuda" and plan.draft_weights == "int8":
        raise PlanError(
            "draft_weights is int8, whose blocks backend ort-cuda has no kernel for: choose same,"
            f" or backend {' or '.join(TENSORRT_BACKENDS)}"
        )
    if backend in TENSORRT_BACKENDS:
        return
    for name in ("compute_capability", "workspace_bytes"):
        value = getattr(plan, name)
        if value is not None:
            raise PlanError(
                f"{name} is {value}, but backend {backend} compiles no plan files: leave it out,"
                f" or choose {' or '.join(TENSORRT_BACKENDS)}"
            )


def _unbuilt_reasons(plan: Plan) -> tuple[str, ...]:
    """One sentence for each value that no export writes and no runtime reads yet."""
    reasons = []
    if plan.batch > 1:
        reasons.append(
            f"batch is {plan.batch}, but every backend drafts for one sequence a call: build 1"
            " (many requests at once, without a draft, need no other plan: runtime/batch.py)"
        )
    if plan.target_weights != "same":
        reasons.append(
            f"target_weights is {plan.target_weights}, but only a draft's weights can be stored"
            " otherwise than as dtype says: choose same"
        )
    if plan.kv_dtype not in ("same", plan.dtype):
        reasons.append(
            f"kv_dtype is {plan.kv_dtype}, but caches have the dtype of the activations,"
            f" {plan.dtype}: choose same"
        )
    return tuple(reasons)
