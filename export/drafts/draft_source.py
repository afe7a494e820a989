"""Drafts for a target: distinguishes EAGLE heads from small causal LMs, and loads either.

Both are loaded into a `Draft`, from which `exporter.py` makes engines, files and manifest entries.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import onnx_ir as ir
import torch
from safetensors import safe_open
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from eagle3.export.checks.self_check import Checked
from eagle3.export.draft_graphs.draft_engines import head_module
from eagle3.export.draft_graphs.head_modules import (
    embedding_table,
)
from eagle3.export.drafts.head_draft import HeadDraft
from eagle3.export.drafts.model_draft import load_model_draft
from eagle3.export.graphs.weights import StoredGraph
from eagle3.export.heads.assume import parse_assumptions
from eagle3.export.heads.checkpoint_files import head_folder, read_config
from eagle3.export.heads.head_config import TargetSizes
from eagle3.export.heads.reader import read_head
from eagle3.export.targets.target import Target
from eagle3.plans.plan import Plan
from eagle3.runtime.bundle.manifest import (
    NO_DRAFT_NAMES,
    is_draft_name,
)
from eagle3.runtime.errors import CheckpointError, ExportError

_NAMED = re.compile(r"([^=/\\]+)=(.+)")


@dataclass(frozen=True)
class DraftSource:
    """The location of a draft, and its name in the bundle (by default its method's)."""

    source: str
    name: str | None = None

    def __post_init__(self) -> None:
        if self.name is not None and not is_draft_name(self.name):
            raise ExportError(
                f"a drafter cannot be named {self.name!r:.80}: use a short lower-case word other"
                f" than {', '.join(NO_DRAFT_NAMES)}, as in mine=PATH"
            )

    @classmethod
    def parse(cls, text: str) -> DraftSource:
        """Parse "PATH" or "NAME=PATH". If the whole text exists on disk, it is a path."""
        named = _NAMED.fullmatch(text)
        if named is None or Path(text).exists():
            return cls(text)
        return cls(named[2], named[1])


class Draft(Checked, Protocol):
    """A draft that was read and fits the target.

    method: a key of the runtime's DRAFT_ENGINES. aux_layer_ids: the hidden_states indices that it
    fuses.
    """

    @property
    def method(self) -> str: ...

    @property
    def aux_layer_ids(self) -> tuple[int, ...]: ...

    @property
    def reads_target_embedding(self) -> bool:
        """Whether the embedding of its `draft` graph is the target's."""
        ...

    def engines(self, target: Target, plan: Plan) -> dict[str, ir.Model]:
        """Return role of an engine -> its traced graph."""

    def shared(self, graph: ir.Model, stored: StoredGraph) -> dict[str, ir.ExternalTensor]:
        """Return the initializers of its `draft` graph that the target's file already contains."""

    def write_files(self, folder: Path, name: str) -> None:
        """Write the files that it needs besides engines."""

    def facts(self) -> dict[str, Any]:
        """Return the fields of the manifest's DraftInfo that it determines."""


def load_draft(
    source: str,
    target: Target,
    plan: Plan,
    *,
    aux_layer_ids: Sequence[int] | None = None,
    assume: Sequence[str] = (),
    trust_remote_code: bool = False,
) -> Draft:
    """Read a head, or a causal LM, that drafts for `target`.

    aux_layer_ids: layers of a head whose config does not name them. assume: KEY=VALUE, decisions
    of the user where a head's checkpoint is ambiguous. Raises ExportError (CheckpointError,
    UnsupportedModel) for what is ambiguous, unsupported or does not fit.
    """
    if is_causal_lm(source):
        return load_model_draft(source, target, plan, trust_remote_code=trust_remote_code)
    embedding = target.model.get_input_embeddings().weight.detach()
    facts = TargetSizes(
        hidden_size=target.config.hidden_size,
        vocab_size=target.vocab_size,
        num_layers=target.kv.num_layers,
        embedding=embedding,
    )
    head = read_head(source, facts, aux_layer_ids, parse_assumptions(assume))
    return HeadDraft(head, head_module(head, target), embedding_table(head, embedding))


def is_causal_lm(source: str) -> bool:
    """Return whether `source` is a causal LM of transformers (or a .gguf file) and not a head.

    EAGLE-1/2 heads are also named LlamaForCausalLM, but no LM has an `fc` before its layers.
    Raises CheckpointError without a config.json, and for a .gguf file that does not exist.
    """
    if Path(source).suffix == ".gguf":
        if not Path(source).is_file():
            raise CheckpointError(f"draft {source}: no such GGUF file")
        return True
    folder = head_folder(source)
    config = read_config(folder)
    architectures, own_code = config.get("architectures"), config.get("auto_map")
    if not isinstance(architectures, list) or len(architectures) != 1:
        return False
    known = architectures[0] in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values() or (
        isinstance(own_code, dict) and "AutoModelForCausalLM" in own_code
    )
    return known and not any(name.startswith("fc.") for name in _tensor_names(folder))


def _tensor_names(folder: Path) -> set[str]:
    """Return the names of a checkpoint's tensors; empty if they cannot be read without its
    weights.
    """
    names: set[str] = set()
    try:
        for file in folder.glob("*.safetensors"):
            with safe_open(file, "pt") as opened:
                names.update(opened.keys())
        for file in () if names else folder.glob("*.bin.index.json"):
            names.update(json.loads(file.read_text(encoding="utf-8"))["weight_map"])
        for file in () if names else sorted(folder.glob("*.bin")):
            names.update(torch.load(file, map_location="cpu", weights_only=True, mmap=True))
    except Exception:  # reading the weights reports the error
        return {"fc."}
    return names or {"fc."}
