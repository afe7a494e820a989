"""What an export writes, what its self-check compares, what int8 costs."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st

import eagle3
from eagle3.export.checks.self_check import INT8_TOLERANCE, SelfCheck, _tokens, check_bundle
from eagle3.export.draft_graphs.head_modules import build_head
from eagle3.export.drafts.head_draft import HeadDraft
from eagle3.export.exporter import write_draft
from eagle3.export.graphs.weights import block_int8, int8_block
from eagle3.export.heads.head_config import TargetSizes
from eagle3.export.heads.reader import read_head
from eagle3.export.targets.target import TORCH_DTYPES, load_target
from eagle3.runtime.bundle.folder import Bundle
from eagle3.runtime.errors import SelfCheckFailed

# What a bundle consists of


def initializers(bundle: Bundle, engine: str) -> dict[str, Any]:
    model = ir.load(bundle.path(bundle.manifest.engines[engine].file))
    return {name: v.const_value for name, v in model.graph.initializers.items()}


def test_every_file_is_listed_with_its_hash(full_bundle: Bundle) -> None:
    full_bundle.verify_hashes()
    files = {str(p.relative_to(full_bundle.root)) for p in full_bundle.root.rglob("*")}
    assert files == {*full_bundle.manifest.files, "manifest.json"}


def test_weights_lie_outside_the_graphs(full_bundle: Bundle) -> None:
    """So that no protobuf nears its 2 GB limit; by names that move with the folder."""
    for engine in full_bundle.manifest.engines:
        for name, tensor in initializers(full_bundle, engine).items():
            if isinstance(tensor, ir.ExternalTensor):
                assert "/" not in str(tensor.location)
            else:
                assert tensor.nbytes < 1024, name
    for name, content in tiny.snapshot(full_bundle.root).items():
        assert str(full_bundle.root).encode() not in content, name


def test_the_drafts_file_does_not_hold_the_embedding(
    llama: Any, head_folder: Path, full_bundle: Bundle
) -> None:
    embedding = llama.get_input_embeddings().weight
    table = initializers(full_bundle, "eagle3.draft")["embed.weight"]
    assert table.location == "target.onnx.data"
    assert np.array_equal(table.numpy(), embedding.numpy())
    head = (head_folder / "model.safetensors").stat().st_size
    own = sum(
        full_bundle.path(f"eagle3.{name}.onnx.data").stat().st_size
        for name in ("draft", "draft_fuse")
    )
    assert own < head


def test_no_weight_is_transposed_at_run_time(full_bundle: Bundle) -> None:
    """MatMul reads [K,N] as stored; a Transpose left in the graph would copy it on every call."""
    for engine in full_bundle.manifest.engines.values():
        model = ir.load(full_bundle.path(engine.file))
        for node in (n for n in model.graph if n.op_type == "Transpose"):
            source = node.inputs[0]
            assert source is not None and not source.is_initializer(), source.name


def test_the_graphs_are_valid_onnx_with_named_dimensions(full_bundle: Bundle) -> None:
    for engine in full_bundle.manifest.engines.values():
        if full_bundle.manifest.plan.lowering == "portable":  # `ort` has operators of its own
            onnx.checker.check_model(full_bundle.path(engine.file))
    target = {s.name: s.shape for s in full_bundle.manifest.engines["target"].inputs}
    assert target["input_ids"] == ("B", "N") and target["tree_mask"] == ("B", "N", "N")
    assert target["past_k.0"] == ("B", 2, 129, 8)  # one slot more than max_seq_len
    outputs = {s.name: s.shape for s in full_bundle.manifest.engines["target"].outputs}
    assert outputs["logits"] == ("B", "M", 64) and outputs["next_token"] == ("B", "M")
    assert outputs["features"] == ("B", "N", 3 * tiny.HIDDEN)


def test_a_portable_bundle_is_standard_onnx(portable_bundle: Bundle) -> None:
    """What TensorRT takes: opset 24, and none of the attributes that it ignores in silence."""
    for engine in portable_bundle.manifest.engines.values():
        model = ir.load(portable_bundle.path(engine.file))
        assert dict(model.opset_imports) == {"": 24} and not model.functions
        for node in (n for n in model.graph if n.op_type == "Attention"):
            assert set(node.attributes) <= {"scale"} and len(node.inputs) == 4


def test_a_bundle_moves(bundle: Bundle, engine: eagle3.Engine, tmp_path: Path) -> None:
    moved = tmp_path / "a b" / "moved"
    shutil.copytree(bundle.root, moved)
    other = eagle3.load(moved, threads=1)
    options: dict[str, Any] = {"max_new_tokens": 24, "draft_top_k": 3, "logit_bias": {1: -100.0}}
    first, second = (e.generate([5, 6, 7], **options) for e in (engine, other))
    assert first.token_ids == second.token_ids
    assert first.stats.accepted_by_position == second.stats.accepted_by_position


def test_a_tree_that_no_graph_grows_is_said(tmp_path: Path) -> None:
    """A GPU would not draft with such a head; an LM never has that graph."""
    said: dict[str, list[str]] = {}
    for method in ("eagle3", "model"):
        draft: Any = SimpleNamespace(
            method=method, engines=lambda *_: {}, write_files=lambda *_: None
        )
        none: Any = None
        report = said.setdefault(method, []).append
        write_draft(tmp_path, "mine", draft, none, none, tiny.tiny_plan(), report)
    assert [line for line in said["eagle3"] if "no graph grows the tree of mine" in line]
    assert not [line for line in said["model"] if "no graph" in line]


# The self-check itself

Check = Callable[[Bundle], tuple[SelfCheck, list[str]]]


@pytest.fixture(scope="module")
def check(llama_folder: Path, head_folder: Path) -> Check:
    """check(bundle): the self-check of an export of `llama` with its head, and what it said."""
    target = load_target(str(llama_folder), "float32")
    head = read_head(head_folder, TargetSizes(tiny.HIDDEN, 64, 8))
    table = target.model.get_input_embeddings().weight.detach()
    draft = HeadDraft(head, build_head(head, TORCH_DTYPES["float32"]), table)

    def run(bundle: Bundle) -> tuple[SelfCheck, list[str]]:
        said: list[str] = []
        return check_bundle(bundle, target, {"eagle3": draft}, said.append), said

    return run


def test_it_uses_different_tokens_whatever_the_tokenizer_knows(llama_folder: Path) -> None:
    """Equal tokens would let almost any mask pass; the tiny tokenizer knows no English."""
    tokens = _tokens(load_target(str(llama_folder), "float32"), limit=1000)
    assert len(tokens) > 300 and len(set(tokens.tolist())) > 32


def test_it_reports_errors_and_near_zero_acceptance(check: Check, bundle: Bundle) -> None:
    """Case 16: a head that does not fit is named as what it is."""
    result, said = check(bundle)
    assert set(result.engines["relative_errors"]) == {
        "logits",
        "features",
        "prefill_logits",
        "tree_logits",
    }
    assert set(result.drafts["eagle3"]["relative_errors"]) == {
        "step_0",
        "step_1",
        "step_2",
        "step_3",
    }
    assert result.drafts["eagle3"]["first_position_acceptance"] < 0.1
    assert bundle.manifest.draft is not None
    assert dict(bundle.manifest.draft.checks) == json.loads(json.dumps(result.drafts["eagle3"]))
    warnings = [line for line in said if line.startswith("warning: ")]
    assert warnings == [f"warning: {w}" for w in result.warnings]
    assert "--aux-layers" in warnings[0] and "vocabulary mapping" in warnings[0]


@pytest.mark.parametrize(
    ("engine", "weight", "named"),
    [
        ("target", "layers.7.mlp.down_proj", "the exported target .* logits"),
        ("target", "norm", "the exported target"),
        ("eagle3.draft", "midlayer.self_attn.o_proj", "the exported eagle3 .* step_1"),
        ("eagle3.draft_fuse", "fc", "the exported eagle3 .* step_0"),
    ],
)
def test_one_altered_weight_fails_it(
    check: Check, bundle: Bundle, tmp_path: Path, engine: str, weight: str, named: str
) -> None:
    """One matrix off by five percent."""
    file = bundle.manifest.engines[engine].file
    model = ir.load(bundle.path(file))
    names = [n for n in model.graph.initializers if weight in n]
    assert names, [*model.graph.initializers]
    value = model.graph.initializers[names[-1]]
    assert value.const_value is not None
    value.const_value = ir.tensor(value.const_value.numpy() * 1.05, name=names[-1])
    ir.save(model, tmp_path / "altered.onnx")
    altered = tiny.edited_bundle(
        bundle, tmp_path / "copy", {file: (tmp_path / "altered.onnx").read_bytes()}
    )
    with pytest.raises(SelfCheckFailed, match=named):
        check(altered)


# int8


@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from([32, 64, 128]),
    st.floats(-6, 6),
    st.sampled_from([ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16]),
)
@settings(max_examples=100, deadline=None)
def test_int8_blocks_keep_every_weight_within_half_a_step(
    seed: int, block: int, magnitude: float, dtype: ir.DataType
) -> None:
    """Also where float16 can hardly hold the scales."""
    rng = np.random.default_rng(seed)
    weight = rng.standard_t(2, (2 * block, 5)) * 10.0**magnitude
    weight[:, 0] = 0.0
    weight = np.clip(weight, -6e4, 6e4).astype(dtype.numpy())
    stored, scales = block_int8(weight, block)
    assert stored.dtype == np.int8 and scales.shape == (2, 5) and stored.min() >= -127
    assert scales.dtype == weight.dtype
    steps = np.repeat(scales.astype(np.float64), block, axis=0)
    values = stored.astype(np.float64) * steps
    assert (np.abs(values - weight.astype(np.float64)) <= steps * 0.5001).all()
    assert (values[:, 0] == 0).all() and np.isfinite(steps).all() and (steps > 0).all()
    if dtype == ir.DataType.FLOAT:  # the largest of a block is stored exactly, up to rounding
        top = np.abs(weight.reshape(2, block, 5)).max(axis=1)
        assert np.allclose(np.abs(values.reshape(2, block, 5)).max(axis=1), top, rtol=1e-5)


def test_the_largest_block_that_divides_is_taken() -> None:
    assert [int8_block(n) for n in (1728, 576, 96, 256, 100, 16)] == [64, 64, 32, 128, None, None]


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "lowering"), [("float32", "ort"), ("float16", "portable")])
def test_an_int8_head_costs_acceptance_at_most(
    small_folder: Path, small: Any, tmp_path: Path, dtype: str, lowering: str
) -> None:
    head = tiny.save_head(
        tmp_path / "head", small, draft_vocab_size=8, aux_layer_ids=(0, 1, 2), intermediate_size=64
    )
    plan = tiny.tiny_plan(draft_weights="int8", dtype=dtype, lowering=lowering)
    bundle = tiny.export_tiny(small_folder, head, tmp_path / "out", plan)
    assert bundle.manifest.draft is not None
    checks = bundle.manifest.draft.checks
    assert checks["tolerance"] == INT8_TOLERANCE
    assert 0 < max(checks["relative_errors"].values()) < INT8_TOLERANCE
    stored = {
        n: t.dtype for n, t in initializers(bundle, "eagle3.draft").items() if t.nbytes >= 256
    }
    assert ir.DataType.INT8 in stored.values()
    floats = [n for n, each in stored.items() if each.is_floating_point() and "scale" not in n]
    assert floats == ["embed.weight"], "the target's embedding is shared as it is"
    engine = eagle3.load(bundle.root, threads=1)
    options: dict[str, Any] = {"max_new_tokens": 32, "logit_bias": {1: -100.0}}
    plain = engine.generate([3, 4], drafter="none", **options)
    assert engine.generate([3, 4], draft_top_k=2, **options).token_ids == plain.token_ids


@pytest.mark.slow
def test_int8_scales_have_the_dtype_of_bfloat16_graphs(
    small_folder: Path, small: Any, tmp_path: Path
) -> None:
    """No CPU runs them: at least their types agree, which ONNX checks at every node."""
    head = tiny.save_head(tmp_path / "head", small, draft_vocab_size=8, aux_layer_ids=(0, 1, 2))
    plan = tiny.tiny_plan(
        draft_weights="int8", dtype="bfloat16", lowering="portable", backend="tensorrt"
    )
    bundle = tiny.export_tiny(small_folder, head, tmp_path / "out", plan)
    for name, engine in bundle.manifest.engines.items():
        inferred = str(tmp_path / f"{name}.onnx")
        onnx.shape_inference.infer_shapes_path(
            str(bundle.path(engine.file)), inferred, check_type=True, strict_mode=True
        )
    scales = [t.dtype for n, t in initializers(bundle, "eagle3.draft").items() if "scale" in n]
    assert scales and set(scales) == {ir.DataType.BFLOAT16}
