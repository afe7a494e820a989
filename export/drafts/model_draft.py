"""A small causal LM as a draft: loaded and traced like a target, followed by a top-k."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from torch import Tensor, nn

from eagle3.export.checks.model_check import check_model
from eagle3.export.checks.readings import AnsweredText, Reading
from eagle3.export.draft_graphs.head_modules import top_k_of
from eagle3.export.graphs.attention import Lowering
from eagle3.export.graphs.lowerings import LOWERINGS
from eagle3.export.graphs.tracer import trace
from eagle3.export.graphs.weights import StoredGraph, embedding_name
from eagle3.export.targets.target import Target, caches, load_target, target_inputs
from eagle3.export.targets.target_graph import TargetGraph
from eagle3.plans.plan import Plan
from eagle3.runtime.bundle.folder import Bundle
from eagle3.runtime.errors import CheckpointError, ExportError

_SHOWN = 3  # ids that an error lists


class ModelGraph(nn.Module):
    """One call of the LM over its static cache.

    Inputs: those of TargetGraph with a window of W rows: tree_mask [B,N,W], window_positions
    [B,W]; top_k [1] int64. Outputs: logits [B,M,Vd] float32; top_log_probs [B,M,K] float32 and
    top_ids [B,M,K] int64, best first. draft_vocab_size: Vd, the first rows of its vocabulary.
    """

    def __init__(self, graph: TargetGraph, draft_vocab_size: int) -> None:
        super().__init__()
        self.lm, self.draft_vocab_size = graph, draft_vocab_size

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        window_positions: Tensor,
        tree_mask: Tensor,
        past_len: Tensor,
        logit_rows: Tensor,
        top_k: Tensor,
        past_k: list[Tensor],
        past_v: list[Tensor],
    ) -> tuple[Tensor, Tensor, Tensor]:
        logits: Tensor = self.lm(
            input_ids,
            position_ids,
            tree_mask,
            past_len,
            logit_rows,
            past_k,
            past_v,
            window_positions,
        )[0]
        logits = logits[..., : self.draft_vocab_size]
        return (logits, *top_k_of(torch.log_softmax(logits, -1), top_k))


@dataclass(frozen=True)
class ModelDraft:
    """A loaded LM that drafts. Its vocabulary is the target's, token for token.

    draft_vocab_size: Vd, the rows that both have; they may differ in padding after the tokens.
    """

    lm: Target
    draft_vocab_size: int
    method = "model"
    aux_layer_ids: tuple[int, ...] = ()

    @property
    def reads_target_embedding(self) -> bool:
        return False  # an LM is exported with its own

    def engines(self, target: Target, plan: Plan) -> dict[str, ir.Model]:
        """Return its one graph, as traced."""
        graph = ModelGraph(TargetGraph(self.lm.model, _lowering(plan), ()), self.draft_vocab_size)
        outputs = ["logits", "top_log_probs", "top_ids"]
        inputs = _inputs(self.lm, plan.draft_capacity)
        with graph.lm.attached():
            return {"draft": trace(graph, inputs, outputs, _lowering(plan), self.lm.architecture)}

    def shared(self, graph: ir.Model, stored: StoredGraph) -> dict[str, ir.ExternalTensor]:
        """Return the weights that are bit-identical to the target's: all of them if the LM
        consists of the target's layers.

        Both graphs name a weight by its place in the model.
        """
        pairs = {name: name.removeprefix("lm.") for name in graph.graph.initializers}
        pairs[embedding_name(graph)] = embedding_name(stored.graph)
        return {
            own: stored.weights[theirs]
            for own, theirs in pairs.items()
            if theirs in stored.weights
            and _equal(graph.graph.initializers[own].const_value, stored.weights[theirs])
        }

    def write_files(self, folder: Path, name: str) -> None:
        """Do nothing: its ids are the target's."""

    def facts(self) -> dict[str, Any]:
        """Return fields of the manifest's DraftInfo."""
        kv = self.lm.kv
        return {
            "dialect": self.lm.architecture,
            "hidden_size": self.lm.config.hidden_size,
            "num_layers": kv.num_layers,
            "num_kv_heads": kv.num_kv_heads,
            "head_dim": kv.head_dim,
            "draft_vocab_size": self.draft_vocab_size,
            "conventions": {},
        }

    def check(self, bundle: Bundle, name: str, reference: Any, tolerance: float) -> dict[str, Any]:
        """Compare the engine with PyTorch."""
        return check_model(bundle, name, self.lm, reference.tokens, tolerance)

    def readings(self, target: Target, texts: Sequence[AnsweredText]) -> tuple[Reading, ...]:
        """Return nothing: there is only one way to read it."""
        return ()


def load_model_draft(
    source: str, target: Target, plan: Plan, *, trust_remote_code: bool
) -> ModelDraft:
    """Load a causal LM to draft for `target`.

    Raises the errors of `load_target`, and CheckpointError for another vocabulary.
    """
    try:
        lm = load_target(
            source, plan.dtype, trust_remote_code=trust_remote_code, max_seq_len=plan.max_seq_len
        )
    except ExportError as error:
        raise type(error)(f"draft {source}, read as a causal LM: {error}") from error
    check_vocabulary(source, lm.tokenizer.get_vocab(), target.tokenizer.get_vocab())
    if plan.draft_weights == "int8":
        _untie(lm)
    return ModelDraft(lm, min(lm.vocab_size, target.vocab_size))


def check_vocabulary(source: str, own: Mapping[str, int], theirs: Mapping[str, int]) -> None:
    """Raise CheckpointError unless every id is the same token in both. Equal sizes are
    not enough.
    """
    own_tokens, tokens = ({i: token for token, i in each.items()} for each in (own, theirs))
    ids = sorted(own_tokens.keys() | tokens.keys())
    different = [i for i in ids if own_tokens.get(i) != tokens.get(i)]
    if different:
        listed = "; ".join(
            f"id {i} is {_say(own_tokens.get(i))} there and {_say(tokens.get(i))} in the target"
            for i in different[:_SHOWN]
        )
        raise CheckpointError(
            f"draft {source}: its vocabulary of {len(own)} tokens is not the target's of"
            f" {len(theirs)}, {len(different)} ids differ: {listed}; use a model of the target's"
            " own family, or an EAGLE head"
        )


def _say(token: str | None) -> str:
    return "no token" if token is None else repr(token)


def _untie(lm: Target) -> None:
    """Give the LM its own lm_head: a tied one would keep the plan's dtype, like the embedding."""
    head = lm.model.get_output_embeddings()
    if head.weight.data_ptr() == lm.model.get_input_embeddings().weight.data_ptr():
        head.weight = nn.Parameter(head.weight.detach().clone(), requires_grad=False)


def _lowering(plan: Plan) -> Lowering:
    return LOWERINGS[plan.lowering]


def _inputs(lm: Target, capacity: int) -> dict[str, tuple[Any, str]]:
    """Return example inputs for a trace, in the order of `ModelGraph.forward`."""
    inputs = target_inputs(lm, capacity)
    batch, rows, window = 2, 5, 7
    mask = torch.ones(batch, rows, window, dtype=torch.bool)
    positions = torch.arange(window).repeat(batch, 1)
    return {
        "input_ids": inputs["input_ids"],
        "position_ids": inputs["position_ids"],
        "window_positions": (positions, "B W"),
        "tree_mask": (mask, "B N W"),
        "past_len": (torch.full((batch,), 2, dtype=torch.int64), "B"),
        "logit_rows": inputs["logit_rows"],
        "top_k": (torch.full((1,), 3, dtype=torch.int64), "1"),
        **caches(lm.kv, capacity, lm.model.dtype, batch),
    }


def _equal(own: Any, theirs: ir.ExternalTensor) -> bool:
    if own is None or own.dtype != theirs.dtype or tuple(own.shape) != tuple(theirs.shape):
        return False
    return bool(np.array_equal(own.numpy(), theirs.numpy()))
