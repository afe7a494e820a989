"""Tables of the rotary embedding, computed at export instead of in every call.

For most models cos and sin are functions of the position alone. The part of the traced graph that
computes them is then evaluated once, on every position that the cache can hold.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from eagle3.runtime.ort.ort_library import import_onnxruntime

_POSITIONS = "position_ids"
# Larger tables would cost more memory than the few nodes that they replace are worth.
_MAX_TABLE_BYTES = 1 << 23


def rotary_tables(
    model: ir.Model, before: ir.Node, cos: ir.Value, sin: ir.Value
) -> tuple[ir.Value, ir.Value, ir.Value] | None:
    """Return the graph's position_ids [B,N], and constants cos and sin [S,D/2] for positions 0 to
    S - 1, inserted before the node `before`.

    cos, sin: values [B,1,N,D] of the graph, both halves equal. S is the capacity of the graph's
    cache. Returns None if the graph has no cache or no positions, if the angles depend on anything
    else, or if the tables would be large.
    """
    inputs = {value.name: value for value in model.graph.inputs}
    positions, past = inputs.get(_POSITIONS), inputs.get("past_k.0")
    if positions is None or past is None or past.shape is None or cos.dtype is None:
        return None
    slots, width = past.shape[2], None if cos.shape is None else cos.shape[-1]
    if not isinstance(slots, int) or not isinstance(width, int):
        return None
    if slots * (width // 2) * cos.dtype.itemsize > _MAX_TABLE_BYTES:
        return None
    computed = _evaluated(model, positions, [cos, sin], slots)
    if computed is None:
        return None
    # As nodes: they stay in the .onnx file, since they are no weights of the model.
    tables = [ir.node("Constant", [], {"value": table}) for table in computed]
    model.graph.insert_before(before, tables)
    return positions, tables[0].outputs[0], tables[1].outputs[0]


def _evaluated(
    model: ir.Model, positions: ir.Value, wanted: list[ir.Value], slots: int
) -> list[ir.Tensor] | None:  # type: ignore[type-arg]
    """Return each wanted value [1,1,S,D] as a tensor [S,D/2]; None if it is no function of the
    positions.
    """
    try:
        graph = ir.convenience.extract(model.graph, [positions], wanted)
    except ValueError:
        return None
    part = ir.Model(graph, ir_version=model.ir_version)
    part.opset_imports.update(model.opset_imports)
    ort = import_onnxruntime()
    options = ort.SessionOptions()
    options.log_severity_level = 4
    session = ort.InferenceSession(
        ir.to_proto(part).SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    found = session.run(None, {_POSITIONS: np.arange(slots)[None]})
    return [ir.Tensor(np.ascontiguousarray(x[0, 0, :, : x.shape[-1] // 2])) for x in found]
