"""Helpers of the tests of plan files: a small ONNX graph, and bfloat16 graphs cast to float32."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

HALF, FLOAT, INT64 = TensorProto.FLOAT16, TensorProto.FLOAT, TensorProto.INT64
HEADS, SLOTS, SIZE = 2, 32, 16


def value(name: str, shape: Sequence[int | str], dtype: int = HALF) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, dtype, shape)


class CachedAttention:
    """One attention layer as an export writes it. Tests modify it before they call `model`.

    Inputs: q, k, v [B,2,N,16], mask [B,1,N,32], past_k and past_v [B,2,32,16], all float16, and
    past_len [B] int64.
    """

    def __init__(self) -> None:
        rows = ["B", HEADS, "N", SIZE]
        self.inputs = {name: value(name, rows) for name in "qkv"}
        self.inputs["mask"] = value("mask", ["B", 1, "N", SLOTS])
        self.inputs["past_len"] = value("past_len", ["B"], INT64)
        self.outputs = {"out": value("out", rows)}
        self.scatters: dict[str, Any] = {}
        for kind in "kv":
            cache = ["B", HEADS, SLOTS, SIZE]
            self.inputs[f"past_{kind}"] = value(f"past_{kind}", cache)
            self.outputs[f"present_{kind}"] = value(f"present_{kind}", cache)
            self.scatters[kind] = helper.make_node(
                "TensorScatter",
                [f"past_{kind}", kind, "past_len"],
                [f"present_{kind}"],
                name=f"scatter_{kind}",
                axis=2,
                mode="linear",
            )
        self.attention = helper.make_node(
            "Attention", ["q", "present_k", "present_v", "mask"], ["out"], name="attend", scale=0.25
        )
        self.more: list[onnx.NodeProto] = []
        self.opset = 24

    def set(self, node: onnx.NodeProto, name: str, attribute: Any) -> None:
        """Set an attribute of a node, replacing an existing one."""
        kept = [each for each in node.attribute if each.name != name]
        del node.attribute[:]
        node.attribute.extend([*kept, helper.make_attribute(name, attribute)])

    def model(self) -> onnx.ModelProto:
        nodes = [*self.scatters.values(), *self.more, self.attention]
        graph = helper.make_graph(
            nodes, "layer", list(self.inputs.values()), list(self.outputs.values())
        )
        opsets = [helper.make_opsetid("", self.opset), helper.make_opsetid("com.microsoft", 1)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=11)


def widened(path: Path) -> bytes:
    """Return the graph at `path`, including its weights, with bfloat16 replaced by float32."""
    model = onnx.load(str(path))
    graph = model.graph
    for tensor in graph.initializer:
        _widen(tensor)
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("t"):
                _widen(attribute.t)
            if attribute.name == "to" and attribute.i == TensorProto.BFLOAT16:
                attribute.i = FLOAT
    for each in (*graph.input, *graph.output, *graph.value_info):
        if each.type.tensor_type.elem_type == TensorProto.BFLOAT16:
            each.type.tensor_type.elem_type = FLOAT
    return bytes(model.SerializeToString())


def _widen(tensor: onnx.TensorProto) -> None:
    if tensor.data_type == TensorProto.BFLOAT16:
        array = onnx.numpy_helper.to_array(tensor).astype(np.float32)
        tensor.CopyFrom(onnx.numpy_helper.from_array(array, tensor.name))
