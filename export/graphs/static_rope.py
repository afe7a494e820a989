"""RoPE whose frequencies depend on the length of the request: frozen, or refused with its limit.

`dynamic` and `longrope` use one table of frequencies up to a length and another beyond it, while
keys that are already cached stay rotated by the first. A graph has one table, so it decodes
exactly what the model decodes as long as no request exceeds that length.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from eagle3.runtime.errors import UnsupportedModel

LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")


def refuse_outgrown_rope(name: str, config: Any, max_seq_len: int) -> None:
    """Raise UnsupportedModel if a request of max_seq_len tokens changes frequencies.

    config: the text model's configuration. name: the architecture, for the message.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    for parameters in (rope, *(v for v in rope.values() if isinstance(v, dict))):
        kind = parameters.get("rope_type", "default")
        if kind not in LENGTH_DEPENDENT_ROPE:
            continue
        limit = config.max_position_embeddings
        if kind == "longrope":
            limit = parameters["original_max_position_embeddings"]
        if max_seq_len > limit:
            raise UnsupportedModel(
                f"{name}: RoPE of type '{kind}' changes its frequencies in requests of more "
                f"than {limit} tokens, which one compiled graph cannot express, and max_seq_len "
                f"is {max_seq_len}; pass --max-seq-len {limit} or less"
            )


@contextmanager
def static_rope(model: nn.Module) -> Iterator[None]:
    """Within this context, length-dependent RoPE uses the frequencies of short requests.

    transformers decides in every call by `rope_type`, which can differ by layer type.
    """
    before: list[tuple[Any, Any, list[tuple[Tensor, Tensor]]]] = []
    try:
        module: Any
        for module in model.modules():
            kinds = getattr(module, "rope_type", None)
            by_layer = kinds if isinstance(kinds, dict) else {"": kinds}
            lasting = [k for k, kind in by_layer.items() if kind in LENGTH_DEPENDENT_ROPE]
            if not lasting:
                continue
            buffers = [_frequencies(module, layer_type) for layer_type in lasting]
            before.append((module, kinds, [(now, now.clone()) for now, _ in buffers]))
            for now, short in buffers:
                now.copy_(short)
            static = dict.fromkeys(by_layer, "default")
            module.rope_type = static if isinstance(kinds, dict) else "default"
        yield
    finally:
        for module, kinds, saved in before:
            module.rope_type = kinds
            for now, then in saved:
                now.copy_(then)


def _frequencies(module: Any, layer_type: str) -> tuple[Tensor, Tensor]:
    """Return the buffer in use, and the frequencies of short requests."""
    prefix = f"{layer_type}_" if layer_type else ""
    return getattr(module, f"{prefix}inv_freq"), getattr(module, f"{prefix}original_inv_freq")
