"""One tracer for every decoder: an unchanged transformers model as a graph over a static cache.

For the time of a trace, functions of this package for attention, masks and experts are registered
with transformers. Everything else (norms, RoPE, routing, logit scaling) is the model's own.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.masking_utils import AttentionMaskInterface

from eagle3.export.graphs.attention import CachedCall, KeyWindow, Lowering, key_window
from eagle3.export.graphs.experts import dense_experts, grouped_experts
from eagle3.export.graphs.lowerings import LOWERINGS
from eagle3.export.graphs.static_rope import static_rope
from eagle3.runtime.errors import UnsupportedModel

# Arguments of attention functions that do not change the result: they are passed in another way
# (the window is in the mask), or matter only for training or for returned attention.
_WITHOUT_EFFECT = frozenset(
    {
        "cache",
        "cache_position",
        "dropout",
        "is_causal",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "past_key_values",
        "position_ids",
        "return_dict",
        "sliding_window",
        "use_cache",
    }
)


@dataclass(frozen=True)
class KvShape:
    """The shape of the caches: num_layers of K and V, each [B, num_kv_heads, S, head_dim]."""

    num_layers: int
    num_kv_heads: int
    head_dim: int


class _NoStore:
    """A placeholder for transformers' cache. The attention writes the static cache."""

    is_compileable = False

    def update(self, k: Tensor, v: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        return k, v

    def get_seq_length(self, *_: Any) -> int:
        return 0

    def get_query_offset(self, *_: Any) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, *_: Any) -> tuple[int, int]:
        return query_length, 0


@dataclass
class _Trace:
    """The call being traced. Its methods are the registered functions."""

    architecture: str
    lowering: Lowering
    call: CachedCall | None = None
    window: KeyWindow | None = None
    logit_rows: Tensor | None = None
    seen: dict[int, tuple[int, int, int]] = field(default_factory=dict)  # kv heads, dim k, dim v

    def mask(
        self, *_: Any, mask_function: Any, dtype: torch.dtype = torch.float32, **__: Any
    ) -> Any:
        assert self.window is not None
        return self.window.bias(mask_function, dtype)

    def attend(
        self,
        module: nn.Module,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """The attention function for transformers. s_aux: the attention sinks, [Hq]."""
        assert self.call is not None
        layer = int(module.layer_idx)  # type: ignore[arg-type]
        self._refuse(layer, attention_mask, kwargs)
        self.seen[layer] = (k.shape[1], k.shape[3], v.shape[3])
        assert attention_mask is not None
        scale = q.shape[-1] ** -0.5 if scaling is None else scaling
        bias = attention_mask
        if bias.dtype != q.dtype:
            bias = bias.clamp(min=torch.finfo(q.dtype).min).to(q.dtype)
        sinks = None if s_aux is None else s_aux.to(q.dtype)
        cap = float(softcap or 0.0)
        return self.call.attend(layer, q, k, v, bias, float(scale), cap, sinks), None

    def pick_rows(self, _module: nn.Module, _args: Any, output: Any) -> Any:
        """A hook between decoder and lm_head: last_hidden_state [B,N,d] -> its logit_rows [B,M,d].

        transformers' own `logits_to_keep` with a row list per sequence would freeze the shapes.
        """
        assert self.logit_rows is not None
        hidden = output.last_hidden_state
        rows = self.logit_rows[:, :, None].expand(-1, -1, hidden.shape[-1])
        output.last_hidden_state = hidden.gather(1, rows)
        return output

    def _refuse(self, layer: int, mask: Tensor | None, kwargs: dict[str, Any]) -> None:
        if mask is None:
            raise UnsupportedModel(
                f"{self.architecture}: layer {layer} attends without a causal mask, "
                "which a cached decoder cannot express"
            )
        for name, value in kwargs.items():
            if value is not None and name not in _WITHOUT_EFFECT:
                raise UnsupportedModel(
                    f"{self.architecture}: layer {layer} passes `{name}` to attention, which is "
                    "not supported; ignoring it would silently change the output"
                )


@contextmanager
def _registered(model: PreTrainedModel, trace: _Trace) -> Iterator[None]:
    """Within this context the model attends through `trace`."""
    name = f"eagle3_{uuid.uuid4().hex}"
    AttentionInterface.register(name, trace.attend)
    AttentionMaskInterface.register(name, trace.mask)
    experts = grouped_experts if trace.lowering.groups_experts else dense_experts
    ALL_EXPERTS_FUNCTIONS.register(name, experts)
    configs = {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}.values()
    fields = ("_attn_implementation", "_experts_implementation")
    before = [(config, field, getattr(config, field)) for config in configs for field in fields]
    hook = model.base_model.register_forward_hook(trace.pick_rows)
    try:
        for config, field, _ in before:
            setattr(config, field, name)
        with static_rope(model):
            yield
    finally:
        hook.remove()
        for config, field, implementation in before:
            setattr(config, field, implementation)
        AttentionInterface._global_mapping.pop(name, None)
        AttentionMaskInterface._global_mapping.pop(name, None)
        ALL_EXPERTS_FUNCTIONS._global_mapping.pop(name, None)


class TargetGraph(nn.Module):
    """The target over a static cache, as it is traced (method section 1, steps 2 and 4).

    Inputs: input_ids [B,N], position_ids [B,N] int64; tree_mask [B,N,N] bool, row i sees row j;
    past_len [B] int64, cache slots filled; logit_rows [B,M] int64, the rows lm_head runs on;
    past_k, past_v per layer [B,Hkv,S,D].
    Outputs: logits [B,M,V] float32; next_token [B,M] int64, the argmax, -1 if logits are NaN;
    features [B,N,F], hidden_states[i] for i in `aux_layer_ids`, low to high: the input of layer i,
    or the output of the last norm for i = number of layers. The presents become outputs when the
    attention is lowered.
    With window_positions [B,W] int64, tree_mask is [B,N,W]: the last W slots also hold rows of
    earlier calls, at these positions.
    """

    def __init__(
        self, model: PreTrainedModel, lowering: Lowering, aux_layer_ids: Sequence[int]
    ) -> None:
        super().__init__()
        self.model = model
        self.aux_layer_ids = tuple(aux_layer_ids)
        self._trace = _Trace(type(model).__name__, lowering)

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        tree_mask: Tensor,
        past_len: Tensor,
        logit_rows: Tensor,
        past_k: list[Tensor],
        past_v: list[Tensor],
        window_positions: Tensor | None = None,
    ) -> tuple[Any, ...]:
        num_rows = input_ids.shape[1]
        call = CachedCall(past_len, past_len.max() + num_rows, past_k, past_v)
        slots = self._trace.lowering.num_slots(call, num_rows)
        self._trace.call, self._trace.logit_rows = call, logit_rows
        row_positions = position_ids if window_positions is None else window_positions
        self._trace.window = key_window(tree_mask, position_ids, past_len, slots, row_positions)
        result = self.model(
            input_ids=input_ids,
            position_ids=position_ids,
            cache=_NoStore(),
            use_cache=False,
            output_hidden_states=bool(self.aux_layer_ids),
            return_dict=True,
        )
        logits = result.logits.float()
        is_number = ~torch.isnan(logits.sum(-1))  # one pass; a NaN in a row makes its sum NaN
        next_token = torch.where(is_number, logits.argmax(-1), -1)
        features = [result.hidden_states[i] for i in self.aux_layer_ids]
        fused = [torch.cat(features, -1)] if features else []
        return (logits, next_token, *fused)

    @contextmanager
    def attached(self) -> Iterator[_Trace]:
        """Within this context the model attends through the lowering."""
        with _registered(self.model, self._trace):
            yield self._trace


def kv_shape(model: PreTrainedModel) -> KvShape:
    """Run two tokens through the model and read the caches' shape from its attention calls.

    Raises UnsupportedModel, naming the architecture, if its attention does not use transformers'
    interface or its layers need caches of different shapes.
    """
    name = type(model).__name__
    num_layers = int(model.config.get_text_config().num_hidden_layers)
    graph = TargetGraph(model, LOWERINGS["portable"], ())
    ids, rows = torch.zeros(1, 2, dtype=torch.int64), torch.arange(2)[None]
    nothing = [torch.empty(1, 1, 2, 1)] * num_layers
    with torch.no_grad(), graph.attached() as trace:
        try:
            mask = torch.ones(1, 2, 2, dtype=torch.bool)
            rows = torch.arange(2)[None]
            graph(ids, rows, mask, torch.zeros(1, dtype=torch.int64), rows, nothing, nothing)
        except UnsupportedModel:
            raise
        except Exception as error:
            raise UnsupportedModel(
                f"{name}: attention does not go through transformers' attention interface "
                f"({type(error).__name__}: {error})"
            ) from error
    if sorted(trace.seen) != list(range(num_layers)):
        raise UnsupportedModel(
            f"{name}: {len(trace.seen)} of {num_layers} layers attend through transformers' "
            "attention interface; recurrent, shared-cache or linear layers are not supported"
        )
    shapes = set(trace.seen.values())
    if len(shapes) != 1 or any(k != v for _, k, v in shapes):
        raise UnsupportedModel(
            f"{name}: its layers need caches of different shapes {sorted(shapes)} "
            "(kv heads, key size, value size); one shape for all is supported"
        )
    heads, head_dim, _ = shapes.pop()
    return KvShape(num_layers, heads, head_dim)
