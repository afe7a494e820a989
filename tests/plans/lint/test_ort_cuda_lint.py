"""The lint reports nodes that ONNX Runtime's CUDA provider runs on the host; exports have none."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

from eagle3.export.draft_graphs.growth_attention import GrowthAttention, LayerSizes
from eagle3.export.exporter import check_device_graphs
from eagle3.export.graphs.graph_builder import GraphBuilder
from eagle3.export.graphs.lowerings import LOWERINGS
from eagle3.plans.lint.ort_cuda_lint import lint_ort_cuda
from eagle3.runtime.bundle.folder import Bundle
from eagle3.runtime.errors import BuildError

FIXED = helper.make_node("Constant", [], ["fixed"], value_ints=[0, -1])


def written(path: Path, *nodes: onnx.NodeProto) -> Path:
    """Write a graph with input x [B,4], past [B] and these nodes to `path`."""
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["B", 4])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["B", 4])
    two = helper.make_tensor("two", TensorProto.INT64, [1], [2])
    past = helper.make_tensor_value_info("past", TensorProto.INT64, ["B"])
    graph = helper.make_graph([FIXED, *nodes], "g", [x, past], [y], [two])
    onnx.save(helper.make_model(graph), path)
    return path


@pytest.mark.parametrize(
    "nodes",
    [
        [helper.make_node("Reshape", ["x", "fixed"], ["y"])],
        [helper.make_node("ReduceSum", ["x", "two"], ["y"])],
        [helper.make_node("Slice", ["x", "two", "two", "", "two"], ["y"])],
        [
            helper.make_node("Shape", ["past"], ["batch"], start=0, end=1),
            helper.make_node("Concat", ["batch", "two"], ["both"], axis=0),
            helper.make_node("Expand", ["x", "both"], ["y"]),
        ],
    ],
)
def test_constants_are_no_fault(tmp_path: Path, nodes: list[onnx.NodeProto]) -> None:
    lint_ort_cuda(written(tmp_path / "g.onnx", *nodes))


def test_every_fault_is_named_with_its_node(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Shape", ["x"], ["rows"], end=1, name="of_x"),
        helper.make_node("Concat", ["rows", "two"], ["target"], axis=0),
        helper.make_node("Reshape", ["x", "target"], ["z"], name="view"),
        helper.make_node("FusedMatMul", ["z", "z"], ["y"], domain="com.microsoft"),
    ]
    with pytest.raises(BuildError) as error:
        lint_ort_cuda(written(tmp_path / "g.onnx", *nodes))
    said = str(error.value)
    assert "Shape node 'of_x' runs on the CPU" in said
    assert "Reshape node 'view' reads 'target', which is not a constant" in said
    assert (
        "FusedMatMul node 'y' is of domain com.microsoft, export with --lowering portable" in said
    )
    assert "Concat" not in said and said.endswith("use a TensorRT backend for this model")


def test_many_inputs_are_joined_few_at_a_time(tmp_path: Path) -> None:
    """A growth graph that repeats its mask for each query head also keeps to the limit."""
    for count in (32, 33):
        nodes = [helper.make_node("Concat", ["x"] * count, ["y"], axis=0, name="all")]
        path = written(tmp_path / f"{count}.onnx", *nodes)
        if count == 32:
            lint_ort_cuda(path)
    with pytest.raises(BuildError, match="Concat node 'all' has 33 inputs, more than 32"):
        lint_ort_cuda(path)
    add = GraphBuilder("tiled", {"": 24})
    bias = add.input("bias", ir.DataType.FLOAT, "B", "N", 3)
    sizes = LayerSizes(ir.DataType.FLOAT, 70, 1, 8, 1.0, 16)
    attention = GrowthAttention(add, sizes, (bias, bias), bias, LOWERINGS["portable"])
    add.output(attention._tiled(bias), "tiled", ir.DataType.FLOAT, "B", "R", 3)
    proto = ir.serde.serialize_model(add.model())
    onnx.save(proto, tmp_path / "tiled.onnx")
    lint_ort_cuda(tmp_path / "tiled.onnx")
    x = np.arange(6, dtype=np.float32).reshape(1, 2, 3)
    (found,) = ReferenceEvaluator(proto).run(None, {"bias": x})
    np.testing.assert_array_equal(found, np.concatenate([x] * 70, axis=1))


def test_more_faults_than_fit(tmp_path: Path) -> None:
    nodes = [helper.make_node("Shape", ["x"], [f"s{i}"]) for i in range(9)]
    with pytest.raises(BuildError, match="'s3' runs on the CPU; and 5 more; use"):
        lint_ort_cuda(written(tmp_path / "g.onnx", *nodes))


def test_a_file_that_is_no_graph(tmp_path: Path) -> None:
    (tmp_path / "g.onnx").write_text("nonsense")
    with pytest.raises(BuildError, match="is not a readable ONNX graph"):
        lint_ort_cuda(tmp_path / "g.onnx")


def test_the_engines_of_a_gpu_leave_nothing_to_the_host(
    windowed_bundle: Bundle, portable_bundle: Bundle, bundle: Bundle
) -> None:
    """`target` and `draft_tree` pass. The `draft` engine, which is not used on a GPU, reads the
    shape of its mask and fails."""
    for owner in (windowed_bundle, portable_bundle):
        for name in ("target", "eagle3.draft_tree"):
            lint_ort_cuda(owner.path(owner.manifest.engines[name].file))
    for owner, name in ((portable_bundle, "eagle3.draft"), (bundle, "target")):
        with pytest.raises(BuildError, match="without the CPU"):
            lint_ort_cuda(owner.path(owner.manifest.engines[name].file))


def test_an_export_for_the_provider_refuses_what_it_cannot_run(
    portable_bundle: Bundle,
) -> None:
    portable = portable_bundle
    engines: dict[str, Any] = dict(portable.manifest.engines)
    plan = replace(portable.manifest.plan, backend="ort-cuda")
    check_device_graphs(portable.root, engines, plan)
    broken = {"eagle3.draft_tree": engines["eagle3.draft"]}
    with pytest.raises(BuildError, match="without the CPU"):
        check_device_graphs(portable.root, broken, plan)
    check_device_graphs(portable.root, broken, portable.manifest.plan)
