"""The lint rejects what TensorRT gets wrong without an error, and names the node."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from onnx import TensorProto, helper
from tensorrt_graphs import FLOAT, HEADS, SIZE, SLOTS, CachedAttention, value

from eagle3.plans.lint.tensorrt_lint import lint, lint_file
from eagle3.runtime.errors import BuildError

Spoil = Callable[[CachedAttention], None]


def _mode(graph: CachedAttention) -> None:
    graph.set(graph.scatters["k"], "mode", "circular")


def _axis(graph: CachedAttention) -> None:
    graph.set(graph.scatters["v"], "axis", 3)


def _rank(graph: CachedAttention) -> None:
    for kind in "kv":
        graph.inputs[f"past_{kind}"] = value(f"past_{kind}", ["B", SLOTS, HEADS * SIZE])


def _dynamic_slots(graph: CachedAttention) -> None:
    graph.inputs["past_k"] = value("past_k", ["B", HEADS, "S", SIZE])


def _cache_type(graph: CachedAttention) -> None:
    graph.inputs["past_k"] = value("past_k", ["B", HEADS, SLOTS, SIZE], TensorProto.INT8)


def _past_is_no_input(graph: CachedAttention) -> None:
    graph.more.append(helper.make_node("Identity", ["past_k"], ["copy"], name="copies"))
    graph.scatters["k"].input[0] = "copy"


def _past_is_read(graph: CachedAttention) -> None:
    graph.more.append(helper.make_node("Identity", ["past_v"], ["copy"], name="copies"))


def _past_is_written_twice(graph: CachedAttention) -> None:
    graph.scatters["v"].input[0] = "past_k"


def _present_is_no_output(graph: CachedAttention) -> None:
    del graph.outputs["present_v"]


def _lengths(graph: CachedAttention) -> None:
    graph.attention.input.extend(["", "", "past_len"])


def _past_key(graph: CachedAttention) -> None:
    graph.attention.input.extend(["past_k", "past_v"])


def _window(graph: CachedAttention) -> None:
    graph.set(graph.attention, "left_window_size", 16)


def _softcap(graph: CachedAttention) -> None:
    graph.set(graph.attention, "softcap", 50.0)


def _softmax_precision(graph: CachedAttention) -> None:
    graph.set(graph.attention, "softmax_precision", int(FLOAT))


def _causal(graph: CachedAttention) -> None:
    graph.set(graph.attention, "is_causal", 1)


def _mask_type(graph: CachedAttention) -> None:
    graph.inputs["mask"] = value("mask", ["B", 1, "N", SLOTS], FLOAT)


def _mask_type_inside(graph: CachedAttention) -> None:
    graph.more.append(helper.make_node("Cast", ["mask"], ["wide"], name="widens", to=FLOAT))
    graph.attention.input[3] = "wide"


def _bool_mask(graph: CachedAttention) -> None:
    graph.inputs["mask"] = value("mask", ["B", 1, "N", SLOTS], TensorProto.BOOL)


def _opset(graph: CachedAttention) -> None:
    graph.opset = 25


def _other_engine(graph: CachedAttention) -> None:
    graph.more.append(helper.make_node("Gelu", ["q"], ["g"], name="fused", domain="com.microsoft"))


TRAPS: list[tuple[Spoil, str]] = [
    (_mode, r"'scatter_k' has mode 'circular': use mode 'linear', the only one"),
    (_axis, r"'scatter_v' has axis 3: use axis 2"),
    (_rank, r"'scatter_k' updates 'past_k' with 3 dimensions: a cache must be \[B, heads"),
    (_dynamic_slots, r"'scatter_k' updates 'past_k' with .* dimension 'S' for its slots: make the"),
    (_cache_type, r"'scatter_k' updates 'past_k' of type INT8: use one of FLOAT16"),
    (_past_is_no_input, r"'scatter_k' updates 'copy', which is not a graph input: make"),
    (_past_is_read, r"'scatter_v' updates 'past_v', which 1 other nodes read: let them read"),
    (_past_is_written_twice, r"'scatter_k' updates 'past_k', which 1 other nodes read"),
    (_present_is_no_output, r"'scatter_v' writes 'present_v', which is not a graph output"),
    (_lengths, r"'attend' has nonpad_kv_seqlen, which TensorRT ignores: express it in"),
    (_past_key, r"'attend' has past_key or past_value: write the cache with a TensorScatter"),
    (_window, r"'attend' has left_window_size, which TensorRT ignores: express it in"),
    (_softcap, r"'attend' has softcap 50, which TensorRT does not support"),
    (_softmax_precision, r"'attend' has softmax_precision, .*: remove it"),
    (_causal, r"'attend' has is_causal together with a mask: express it in the mask alone"),
    (_mask_type, r"'attend' has a mask of type FLOAT for a query of type FLOAT16: give the"),
    (_mask_type_inside, r"'attend' has a mask of type FLOAT for a query of type FLOAT16"),
    (_bool_mask, r"'attend' has a mask of type BOOL for a query of type FLOAT16"),
    (_opset, r"opset 25 is unsupported: export it with opset 24"),
    (_other_engine, r"Gelu node 'fused' is one of 1 nodes with .* not .* \(com.microsoft.Gelu"),
    (_other_engine, r"export the bundle again with --lowering portable"),
]


@pytest.mark.parametrize(("spoil", "message"), TRAPS, ids=[f.__name__[1:] for f, _ in TRAPS])
def test_a_trap_is_refused_by_name(spoil: Spoil, message: str) -> None:
    graph = CachedAttention()
    spoil(graph)
    with pytest.raises(
        BuildError, match=f"layer.onnx cannot be compiled to a plan file: .*{message}"
    ):
        lint(graph.model(), "layer.onnx")


def test_a_good_graph_passes_and_says_what_must_become_of_it() -> None:
    graph = CachedAttention()
    graph.set(graph.scatters["v"], "axis", -2)
    facts = lint(graph.model(), "layer.onnx")
    assert facts.inputs == ("q", "k", "v", "mask", "past_len", "past_k", "past_v")
    assert set(facts.outputs) == {"out", "present_k", "present_v"}
    assert facts.aliases == {"present_k": "past_k", "present_v": "past_v"}
    assert (facts.num_cache_updates, facts.num_attentions, facts.files) == (2, 1, ())


def test_a_cache_s_shape_may_be_read() -> None:
    """Exports read it for the batch size. A Shape reads no element that the update overwrites."""
    graph = CachedAttention()
    graph.more.append(helper.make_node("Shape", ["past_k"], ["batch"], end=1))
    assert lint(graph.model(), "layer.onnx").num_cache_updates == 2


def test_attention_without_a_cache_passes() -> None:
    """Attention of a plain causal model has is_causal and no mask."""
    graph = CachedAttention()
    del graph.attention.input[3:]
    graph.set(graph.attention, "is_causal", 1)
    assert lint(graph.model(), "layer.onnx").num_attentions == 1


def test_a_node_in_a_branch_is_found() -> None:
    """The lint also checks subgraphs, such as the branches of an If."""
    inner = CachedAttention()
    inner.set(inner.attention, "softcap", 30.0)
    inner.attention.output[0] = "inner"
    branch = helper.make_graph([inner.attention], "then", [], [value("inner", ["B"])])
    outer = CachedAttention()
    outer.more.append(
        helper.make_node("If", ["flag"], ["chosen"], then_branch=branch, else_branch=branch)
    )
    outer.inputs["flag"] = value("flag", [], TensorProto.BOOL)
    with pytest.raises(BuildError, match="'attend' has softcap 30"):
        lint(outer.model(), "layer.onnx")


def test_many_faults_are_named_and_the_rest_counted() -> None:
    graph = CachedAttention()
    for spoil in (_mode, _axis, _lengths, _window, _softcap, _causal):
        spoil(graph)
    with pytest.raises(BuildError, match=r"scatter_k.*scatter_v.*attend.*; and 2 more"):
        lint(graph.model(), "layer.onnx")


def test_what_is_no_onnx_is_said(tmp_path: Path) -> None:
    (tmp_path / "x.onnx").write_bytes(b"not a graph")
    with pytest.raises(BuildError, match="x.onnx is not a readable ONNX graph"):
        lint_file(tmp_path / "x.onnx")
