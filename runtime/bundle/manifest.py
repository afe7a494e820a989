"""`manifest.json`, the description of a bundle, as frozen dataclasses.

Export writes `Manifest.to_json()`; `Bundle.open` reads it back before anything is loaded. A field
that is unknown, missing or of another type raises BundleError with its dotted path
(`target.vocab_size`), because a partly understood manifest would silently run a wrong model.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any

from eagle3.plans.plan import DRAFT_WEIGHTS, Plan
from eagle3.plans.tree_plan import TreePlan
from eagle3.runtime.bundle.strict_json import Rule, json_object, plain, read
from eagle3.runtime.errors import BundleError, PlanError

FORMAT = "eagle3-bundle"
SCHEMA_VERSION = 2

DRAFT_ENGINES = {"eagle3": ("draft_fuse", "draft"), "eagle": ("draft",), "model": ("draft",)}
"""Draft method -> the engines it needs besides `target`. A head without `draft_fuse` reads the
target's features directly; a `model` reads only tokens."""
HEAD_METHODS = ("eagle3", "eagle")
"""Methods that read the target's features and have their own draft vocabulary."""
BUILT_IN_DRAFTERS = ("none", "lookup")
"""Drafters that need no engine and are available in every bundle."""
NO_DRAFT_NAMES = (*BUILT_IN_DRAFTERS, "target", "tokenizer", "chat_template")
"""Names that a draft cannot have, because names of other files in a bundle begin with them."""


def engine_name(draft: str, role: str) -> str:
    """Return the name of a draft's engine. role: one of DRAFT_ENGINES of its method."""
    return f"{draft}.{role}"


def target_ids_name(draft: str) -> str:
    """Return the name of the file that maps a head's draft ids to the target's ids."""
    return f"{draft}.target_ids.npy"


Count = Annotated[int, Rule("at least 1", lambda n: n >= 1)]
Index = Annotated[int, Rule("at least 0", lambda n: n >= 0)]
NonEmptyText = Annotated[str, Rule("a text of one or more characters", bool)]
Sha256 = Annotated[
    str, Rule("64 lower-case hex digits", lambda s: bool(re.fullmatch("[0-9a-f]{64}", s)))
]
DraftWeights = Annotated[
    str, Rule(f"one of {', '.join(DRAFT_WEIGHTS)}", lambda s: s in DRAFT_WEIGHTS)
]
TENSOR_DTYPES = ("float32", "float16", "bfloat16", "int64", "int32", "int8", "uint8", "bool")
TensorDtype = Annotated[
    str, Rule(f"one of {', '.join(TENSOR_DTYPES)}", lambda s: s in TENSOR_DTYPES)
]


@dataclass(frozen=True)
class TargetInfo:
    """The target model: the sizes of its caches and of the draft's inputs."""

    architecture: NonEmptyText
    vocab_size: Count
    """V: rows of the embedding. Every id of a prompt is below it."""
    hidden_size: Count
    num_layers: Count
    num_kv_heads: Count
    head_dim: Count
    max_position_embeddings: Count
    aux_layer_ids: tuple[Index, ...]
    """`hidden_states` indices (transformers) that the target outputs, low to high: the union of
    the layers that the heads fuse. Index num_layers is the final hidden state after the last norm.
    """
    feature_size: Index
    """Width of the `features` output: len(aux_layer_ids) * hidden_size."""
    source: NonEmptyText


@dataclass(frozen=True)
class Convention:
    """How one ambiguity of a draft checkpoint was resolved, and what decided it."""

    value: Any
    source: NonEmptyText


@dataclass(frozen=True)
class DraftInfo:
    """One draft of a bundle: a head, or a small causal LM."""

    method: NonEmptyText
    """A key of DRAFT_ENGINES."""
    dialect: NonEmptyText
    source: NonEmptyText
    hidden_size: Count
    num_layers: Count
    num_kv_heads: Count
    head_dim: Count
    draft_vocab_size: Count
    aux_layer_ids: tuple[Index, ...]
    """`hidden_states` indices of the target that the head fuses, in its order; empty for an LM."""
    weights: DraftWeights
    """Storage of its matrices: "same" for the plan's dtype, or "int8" with scales."""
    tree: TreePlan
    """The default tree of a request."""
    conventions: Mapping[str, Convention]
    checks: Mapping[str, Any]
    """Results of the checks that the export made, for readers of the manifest."""
    command: NonEmptyText
    """The command that added the draft to the bundle."""


@dataclass(frozen=True)
class TensorSpec:
    """An input or output of an engine. A symbolic dimension is a string."""

    name: NonEmptyText
    dtype: TensorDtype
    shape: tuple[Index | NonEmptyText, ...]


@dataclass(frozen=True)
class EngineInfo:
    """An engine's graph file and its signature."""

    file: NonEmptyText
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]


@dataclass(frozen=True)
class FileInfo:
    """Size in bytes and SHA-256 of a file of the bundle."""

    size: Index
    sha256: Sha256


@dataclass(frozen=True)
class TokenizerInfo:
    """Tokenizer and chat template files, and the token ids and strings that they use."""

    file: NonEmptyText
    chat_template: NonEmptyText | None
    eos_token_ids: tuple[Index, ...]
    bos_token_id: Index | None
    special_tokens: Mapping[str, str]
    """Name (`bos_token`, ...) -> text, the variables of the chat template."""


@dataclass(frozen=True)
class GenerationDefaults:
    """Recommendations of the target's generation config; None where it has none."""

    eos_token_ids: tuple[Index, ...]
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


@dataclass(frozen=True)
class Manifest:
    """The content of `manifest.json`, without `format` and `schema_version`."""

    created_by: Mapping[str, str]
    """Tool -> version."""
    command: NonEmptyText
    plan: Plan
    target: TargetInfo
    drafts: Mapping[str, DraftInfo]
    """Drafter name -> draft, the default first. Empty if only plain decoding is available."""
    engines: Mapping[str, EngineInfo]
    files: Mapping[str, FileInfo]
    """Path relative to the bundle, with `/` -> file: every file except the manifest itself."""
    tokenizer: TokenizerInfo
    generation: GenerationDefaults
    self_check: Mapping[str, Any]

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object that `from_json` reads."""
        head = {"format": FORMAT, "schema_version": SCHEMA_VERSION}
        return {**head, **plain(self)}

    @classmethod
    def from_json(cls, data: object) -> "Manifest":
        """Read a manifest. Raises BundleError for another format or version, or an
        invalid field.
        """
        body = _without_head(json_object(data, "manifest"))
        manifest: Manifest = read(cls, body, "")
        _check_engines(manifest)
        _check_references(manifest)
        _check_eos(manifest)
        _check_features(manifest)
        for name in manifest.drafts:
            _check_draft(manifest, name)
        return manifest

    @property
    def draft(self) -> DraftInfo | None:
        """The default draft, or None if the bundle has none."""
        return next(iter(self.drafts.values()), None)


def _without_head(data: dict[str, Any]) -> dict[str, Any]:
    """Return `data` without format and version, which are checked before any other field."""
    if data.get("format") != FORMAT:
        raise BundleError(f"manifest's format is {data.get('format')!r}, not {FORMAT!r}")
    version = data.get("schema_version")
    if type(version) is not int or version != SCHEMA_VERSION:
        raise BundleError(
            f"manifest has schema_version {version!r}, this eagle3 reads {SCHEMA_VERSION}:"
            " install the eagle3 that wrote the bundle (see its created_by), or export it again"
        )
    return {k: v for k, v in data.items() if k not in ("format", "schema_version")}


def is_draft_name(name: str) -> bool:
    """Return whether a draft can have this name. Names of its engines and files begin with it."""
    return bool(re.fullmatch("[a-z][a-z0-9_-]{0,63}", name)) and name not in NO_DRAFT_NAMES


def _check_engines(manifest: Manifest) -> None:
    """Raise BundleError unless all methods are known and all of their engines are listed."""
    needed = ["target"]
    for name, info in manifest.drafts.items():
        if not is_draft_name(name):
            raise BundleError(
                f"drafts has a draft named {name!r:.80}: a name is a short lower-case word, and"
                f" none of {', '.join(NO_DRAFT_NAMES)}; export the bundle again"
            )
        if info.method not in DRAFT_ENGINES:
            raise BundleError(
                f"drafts.{name}.method is {info.method!r}, this eagle3 knows"
                f" {', '.join(DRAFT_ENGINES)}: install the eagle3 that wrote the bundle, or export"
                " it again"
            )
        needed += [engine_name(name, role) for role in DRAFT_ENGINES[info.method]]
    missing = [name for name in needed if name not in manifest.engines]
    if missing:
        raise BundleError(
            f"engines has {[*manifest.engines]} and lacks {missing}: export the bundle again"
        )


def _check_eos(manifest: Manifest) -> None:
    """Raise BundleError for an EOS id that the target cannot produce: it would never end a text."""
    vocab_size = manifest.target.vocab_size
    for field in ("tokenizer", "generation"):
        beyond = [i for i in getattr(manifest, field).eos_token_ids if i >= vocab_size]
        if beyond:
            raise BundleError(
                f"{field}.eos_token_ids has {beyond}, but target.vocab_size is {vocab_size}:"
                " export the bundle again"
            )


def _check_references(manifest: Manifest) -> None:
    """Raise BundleError unless `files` lists every file that another field names."""
    named = {f"engines.{name}.file": engine.file for name, engine in manifest.engines.items()}
    named["tokenizer.file"] = manifest.tokenizer.file
    if manifest.tokenizer.chat_template is not None:
        named["tokenizer.chat_template"] = manifest.tokenizer.chat_template
    for name, info in manifest.drafts.items():
        if info.method in HEAD_METHODS:
            named[f"{name}'s map to the target's ids"] = target_ids_name(name)
    for field, file in named.items():
        if file not in manifest.files:
            raise BundleError(
                f"{field} is {file!r}, which `files` does not list: export the bundle again"
            )


def _check_features(manifest: Manifest) -> None:
    """Raise BundleError unless the features that the target outputs are consistent."""
    target = manifest.target
    beyond = [i for i in target.aux_layer_ids if i > target.num_layers]
    if beyond:
        raise BundleError(
            f"target.aux_layer_ids names hidden_states {beyond}, but num_layers is"
            f" {target.num_layers}: export the bundle again"
        )
    width = len(target.aux_layer_ids) * target.hidden_size
    if target.feature_size != width:
        raise BundleError(
            f"target.feature_size is {target.feature_size}, but {len(target.aux_layer_ids)}"
            f" aux_layer_ids of hidden_size {target.hidden_size} make {width}: export the bundle"
            " again"
        )


def _check_draft(manifest: Manifest, name: str) -> None:
    """Raise BundleError unless a draft fits its target, and its tree fits the engines."""
    target, draft, where = manifest.target, manifest.drafts[name], f"drafts.{name}"
    missing = [i for i in draft.aux_layer_ids if i not in target.aux_layer_ids]
    if missing or bool(draft.aux_layer_ids) != (draft.method in HEAD_METHODS):
        raise BundleError(
            f"{where}.aux_layer_ids is {[*draft.aux_layer_ids]}, but its method is {draft.method}"
            f" and the target outputs hidden_states {[*target.aux_layer_ids]}: export the bundle"
            " again"
        )
    width = len(draft.aux_layer_ids) * target.hidden_size
    if draft.method == "eagle" and width != draft.hidden_size:
        raise BundleError(
            f"{where} reads {width} features, but a draft of method {draft.method} reads features"
            f" of its hidden_size {draft.hidden_size}: export the bundle again"
        )
    if draft.draft_vocab_size > target.vocab_size:
        raise BundleError(
            f"{where}.draft_vocab_size is {draft.draft_vocab_size}, more than target.vocab_size"
            f" {target.vocab_size}: this draft belongs to another target"
        )
    try:
        replace(manifest.plan, tree=draft.tree)
    except PlanError as error:
        raise BundleError(f"{where}.tree: {error}") from error
