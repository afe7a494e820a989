"""An EAGLE head as a draft: its engines, shared weights, facts and checks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from eagle3.export.checks.growth_check import grown_tree_agreement
from eagle3.export.checks.head_check import check_head
from eagle3.export.checks.readings import AnsweredText, Reading, compare_readings
from eagle3.export.draft_graphs.draft_engines import trace_draft_engines
from eagle3.export.draft_graphs.head_modules import (
    Eagle1Head,
    EagleHead,
)
from eagle3.export.graphs.lowerings import LOWERINGS
from eagle3.export.graphs.weights import StoredGraph, lm_head_name, shared_embedding
from eagle3.export.heads.head_config import Head
from eagle3.export.targets.target import Target
from eagle3.plans.plan import Plan
from eagle3.runtime.bundle.folder import Bundle
from eagle3.runtime.bundle.manifest import (
    Convention,
    engine_name,
    target_ids_name,
)
from eagle3.runtime.ort.growth_engine import ENGINE as GROWTH
from eagle3.runtime.ort.growth_engine import grown_tree


@dataclass(frozen=True)
class HeadDraft:
    """An EAGLE head: its checkpoint, the module that computes it, and the embedding [V,d] it
    reads.
    """

    head: Head
    module: EagleHead | Eagle1Head
    table: torch.Tensor

    @property
    def method(self) -> str:
        return self.head.config.drafter

    @property
    def aux_layer_ids(self) -> tuple[int, ...]:
        return tuple(self.head.config.aux_layer_ids)

    @property
    def reads_target_embedding(self) -> bool:
        return self.head.own_embedding is None

    def engines(self, target: Target, plan: Plan) -> dict[str, ir.Model]:
        return trace_draft_engines(
            self.head,
            self.module,
            self.table,
            LOWERINGS[plan.lowering],
            plan.draft_capacity,
            grown_tree(plan.tree, self.head.config.draft_vocab_size),
            may_tie=plan.draft_weights != "int8",
        )

    def shared(self, graph: ir.Model, stored: StoredGraph) -> dict[str, ir.ExternalTensor]:
        """Return the embedding, and the lm_head of an EAGLE-1/2 head."""
        pairs: dict[str, str] = {}
        if self.reads_target_embedding:
            pairs |= shared_embedding(graph, stored.graph)
        own, theirs = lm_head_name(graph), lm_head_name(stored.graph)
        if self.head.config.method == "eagle1" and own is not None and theirs is not None:
            pairs[own] = theirs
        # A tiny weight stays in the .onnx file.
        return {own: stored.weights[name] for own, name in pairs.items() if name in stored.weights}

    def write_files(self, folder: Path, name: str) -> None:
        np.save(folder / target_ids_name(name), self.head.target_ids)

    def facts(self) -> dict[str, Any]:
        config = self.head.config
        return {
            "dialect": config.dialect,
            "hidden_size": config.hidden_size,
            "num_layers": 1,
            "num_kv_heads": config.num_kv_heads,
            "head_dim": config.head_dim,
            "draft_vocab_size": config.draft_vocab_size,
            "conventions": {
                name: Convention(each.value, each.source)
                for name, each in config.conventions.items()
            },
        }

    def check(self, bundle: Bundle, name: str, reference: Any, tolerance: float) -> dict[str, Any]:
        table = self.table
        if self.reads_target_embedding:
            table = reference.embedding(table)
        result = check_head(bundle, name, self.module, table, reference, tolerance)
        if engine_name(name, GROWTH) in bundle.manifest.engines:
            result["grown_tree_agreement"] = grown_tree_agreement(bundle, name, reference)
        return result

    def readings(self, target: Target, texts: Sequence[AnsweredText]) -> tuple[Reading, ...]:
        """Return its results as it was read, and under other readings."""
        return compare_readings(self.head, target, texts)
