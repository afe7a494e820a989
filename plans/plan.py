"""What to build: static shapes, tree budget, precision. The only place where defaults live.

`eagle3 export` compiles engines for one `Plan`, which the bundle's manifest then carries; the
runtime allocates its buffers from it, and a request may ask for a smaller or larger tree within
it (`Plan.override`). Neither object ever changes: another tree is a new object. What contradicts
itself is in `rules.py`, what a device has and costs in `device.py` and `roofline.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from numbers import Integral
from typing import Any

from eagle3.plans.backends import (
    PADDED_BACKENDS,
    check_backend,
    check_choice,
    check_compute_capability,
    unbuilt_reasons,
    widths_of,
    widths_up_to,
)
from eagle3.plans.tree_paths import DYNAMIC, TreePaths, named_paths
from eagle3.runtime.errors import PlanError

DTYPES = ("float32", "float16", "bfloat16")
TARGET_WEIGHTS = ("same", "int8")
DRAFT_WEIGHTS = ("same", "int8")
KV_DTYPES = ("same", *DTYPES)
LOWERINGS = ("ort", "portable")
BACKENDS = ("ort-cpu", "ort-cuda", "tensorrt", "tensorrt-rtx")

MAX_BATCH = 1024
MAX_SEQ_LEN = 1 << 20
MAX_WORKSPACE_BYTES = 1 << 40
MAX_DRAFT_TOKENS = 1024
MAX_DRAFT_DEPTH = 1024
MAX_DRAFT_TOP_K = 256
_DRAFT_ROWS_PER_TOKEN = 4


@dataclass(frozen=True)
class TreePlan:
    """The draft tree of a round, root excluded. Raises PlanError for a value out of range.

    Dynamic (EAGLE-2) unless `static` names its nodes (EAGLE-1); the sizes then cut that tree.
    `num_draft_tokens` may exceed `num_candidates`: the tree then has every candidate there is.
    """

    draft_top_k: int = 1
    """K: children each frontier node proposes, and nodes kept as the next frontier."""
    draft_depth: int = 3
    """D: number of levels below the root."""
    num_draft_tokens: int = 3
    """Nodes kept for verification; one target call sees these and the root."""
    static: TreePaths | None = None
    """The nodes of a static tree; None lets the draft's scores choose them."""

    def __post_init__(self) -> None:
        _set_int(self, "draft_top_k", MAX_DRAFT_TOP_K, where="tree.")
        _set_int(self, "draft_depth", MAX_DRAFT_DEPTH, where="tree.")
        _set_int(self, "num_draft_tokens", MAX_DRAFT_TOKENS, where="tree.")
        if not isinstance(self.static, TreePaths | None):
            raise PlanError(f"tree.static is {self.static!r:.80}: give TreePaths or None")

    @classmethod
    def of_paths(cls, paths: TreePaths, **sizes: int) -> TreePlan:
        """The static tree of `paths`, whole but for the sizes that are given."""
        whole = {
            "draft_top_k": paths.top_k,
            "draft_depth": paths.depth,
            "num_draft_tokens": paths.num_nodes,
        }
        return cls(**{**whole, **sizes}, static=paths)

    @property
    def policy(self) -> str:
        """`dynamic` or `static`."""
        return DYNAMIC if self.static is None else "static"

    @property
    def static_in_use(self) -> TreePaths | None:
        """The static tree within the sizes."""
        if self.static is None:
            return None
        return self.static.cut(self.draft_top_k, self.draft_depth, self.num_draft_tokens)

    @property
    def num_candidates(self) -> int:
        """Nodes a dynamic tree scores before the rerank: K under the root, K*K a level below."""
        return self.draft_top_k + (self.draft_depth - 1) * self.draft_top_k**2

    @property
    def top_k_in_use(self) -> int:
        """More children a node, or frontier nodes, than tokens in the tree change nothing."""
        paths = self.static_in_use
        return min(self.draft_top_k, self.num_draft_tokens) if paths is None else paths.top_k

    @property
    def depth_in_use(self) -> int:
        """More levels than tokens in the tree change nothing."""
        paths = self.static_in_use
        return min(self.draft_depth, self.num_draft_tokens) if paths is None else paths.depth

    @property
    def num_draft_rows(self) -> int:
        """Rows of the draft in one round, besides those of committed tokens."""
        paths = self.static_in_use
        if paths is None:
            return self.top_k_in_use * (self.depth_in_use - 1)
        return paths.num_draft_rows

    def to_json(self) -> dict[str, Any]:
        """The fields as a JSON object."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: object) -> TreePlan:
        """Read `to_json`'s object; PlanError for a missing, unknown or wrong field."""
        values = _exact_fields(cls, data, "tree")
        static = values.pop("static")
        return cls(**values, static=None if static is None else TreePaths.from_json(static))


TreeRequest = str | Sequence[Sequence[int]] | TreePlan
"""A tree as a request may name it: "dynamic" or a static tree's name, paths, or a whole plan."""


def _requested(tree: TreeRequest, default: TreePlan) -> TreePlan:
    """Raises PlanError for a name that is unknown and paths that make no tree."""
    if isinstance(tree, TreePlan):
        return tree
    if isinstance(tree, str):
        if tree == DYNAMIC:
            return replace(default, static=None)
        return TreePlan.of_paths(named_paths(tree))
    return TreePlan.of_paths(TreePaths(tree))  # type: ignore[arg-type]


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
        _set_int(self, "batch", MAX_BATCH)
        _set_int(self, "max_seq_len", MAX_SEQ_LEN, low=2)
        _set_int(self, "prefill_chunk", self.max_seq_len, "max_seq_len")
        # One target call holds the root and the tree, and all of it must fit the cache.
        _set_int(self, "max_draft_tokens", MAX_DRAFT_TOKENS)
        _set_int(self, "max_draft_tokens", self.max_seq_len - 1, "max_seq_len - 1")
        _check_tree(self.tree, self.max_draft_tokens)
        check_choice("dtype", self.dtype, DTYPES)
        check_choice("target_weights", self.target_weights, TARGET_WEIGHTS)
        check_choice("draft_weights", self.draft_weights, DRAFT_WEIGHTS)
        check_choice("kv_dtype", self.kv_dtype, KV_DTYPES)
        check_choice("lowering", self.lowering, LOWERINGS)
        check_choice("backend", self.backend, BACKENDS)
        if self.workspace_bytes is not None:
            _set_int(self, "workspace_bytes", MAX_WORKSPACE_BYTES)
        check_compute_capability(self.compute_capability)
        widths = widths_of(self.verify_widths, self.max_draft_tokens + 1, self.max_seq_len)
        object.__setattr__(self, "verify_widths", widths)
        check_backend(self)

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
        return unbuilt_reasons(self)

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
        base = self.tree if tree is None else _requested(tree, self.tree)
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
        values = _exact_fields(cls, data, "plan")
        plan = cls(**{**values, "tree": TreePlan.from_json(values["tree"])})
        plan.require_built()
        return plan


def _exact_fields(cls: type[Plan] | type[TreePlan], data: object, where: str) -> dict[str, Any]:
    """`data` as keyword arguments of `cls`, which must have exactly its fields."""
    if not isinstance(data, Mapping):
        raise PlanError(f"{where} is {type(data).__name__}, not a JSON object")
    known = [each.name for each in fields(cls)]
    unknown = sorted(str(key) for key in data if key not in known)
    if unknown:
        raise PlanError(f"{where} has unknown fields {unknown}; it knows {known}: remove them")
    missing = [name for name in known if name not in data]
    if missing:
        raise PlanError(f"{where} lacks the fields {missing}: add them")
    return dict(data)


def _set_int(
    plan: Plan | TreePlan,
    name: str,
    high: int,
    high_name: str = "",
    *,
    low: int = 1,
    where: str = "",
) -> None:
    """Stores a field as int, whatever integer type it has; PlanError outside [low, high]."""
    value = getattr(plan, name)
    limit = f"{high_name} = {high}" if high_name else str(high)
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise PlanError(f"{where}{name} is {value!r}: give an integer from {low} to {limit}")
    if not low <= int(value) <= high:
        hint = "; raise max_seq_len or lower it" if high_name and int(value) > high else ""
        raise PlanError(f"{where}{name} is {value}, allowed are {low} to {limit}{hint}")
    object.__setattr__(plan, name, int(value))


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
