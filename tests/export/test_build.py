"""The export as a whole: what it leaves on disk, what it compares, what it says."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st

import eagle3
from eagle3.export.attention import KeyWindow
from eagle3.export.build import ExportRequest, export_bundle
from eagle3.export.check import INT8_TOLERANCE, SelfCheck, _tokens, check_bundle
from eagle3.export.drafts import DraftSource, HeadDraft
from eagle3.export.head_graph import build_head
from eagle3.export.heads import TargetFacts, read_head
from eagle3.export.publish import publish
from eagle3.export.target import DTYPES, load_target
from eagle3.export.weights import block_int8, int8_block
from eagle3.runtime.bundle import Bundle
from eagle3.runtime.errors import ExportError, SelfCheckFailed

# What is left on disk


@pytest.fixture(scope="module")
def shallow_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = tiny.tiny_model("llama", num_layers=2, scale=2.0)
    return tiny.save_target(tmp_path_factory.mktemp("shallow"), model)


def request_of(target: Path, output: Path, **options: Any) -> ExportRequest:
    fields: dict[str, Any] = {"drafts": (), "plan": tiny.tiny_plan(), **options}
    return ExportRequest(target=str(target), output=output, **fields)


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_an_interrupted_export_leaves_everything_as_it_was(
    shallow_folder: Path, bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C after the engines are written: nothing new, no temporary folder, the old bundle."""
    output = tmp_path / "out"
    shutil.copytree(bundle.root, output)
    before = snapshot(tmp_path)

    def interrupt(_: Any, folder: Path) -> Any:
        assert (folder / "target.onnx.data").stat().st_size > 0
        assert folder.parent == tmp_path and folder != output
        raise KeyboardInterrupt

    monkeypatch.setattr("eagle3.export.build.write_tokenizer", interrupt)
    with pytest.raises(KeyboardInterrupt):
        export_bundle(request_of(shallow_folder, output, force=True))
    assert snapshot(tmp_path) == before
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_a_failed_self_check_writes_nothing(
    shallow_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case 22: a graph in which rows see their siblings."""
    honest = KeyWindow.bias

    def everything(self: KeyWindow, rule: Any, dtype: Any) -> Any:
        seen = self.key_positions <= self.query_positions
        return honest(KeyWindow(seen, self.key_positions, self.query_positions), rule, dtype)

    monkeypatch.setattr(KeyWindow, "bias", everything)
    with pytest.raises(SelfCheckFailed, match="tree_logits") as caught:
        export_bundle(request_of(shallow_folder, tmp_path / "out"))
    assert "tolerance" in str(caught.value) and not list(tmp_path.iterdir())


def test_force_replaces_a_bundle(shallow_folder: Path, bundle: Bundle, tmp_path: Path) -> None:
    shutil.copytree(bundle.root, tmp_path / "out")
    new, _ = export_bundle(request_of(shallow_folder, tmp_path / "out", force=True))
    assert new.manifest.draft is None and bundle.manifest.draft is not None
    assert {p.name for p in new.root.iterdir()} == {*new.manifest.files, "manifest.json"}
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


@pytest.fixture
def finished(tmp_path: Path) -> tuple[Path, Path]:
    """A new bundle that waits to be renamed to `out`, where an old one stands."""
    for name in ("new", "out"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "manifest.json").write_text(name)
    return tmp_path / "new", tmp_path / "out"


def failing_renames(monkeypatch: pytest.MonkeyPatch, error: BaseException, *fails: bool) -> None:
    """Each rename fails or does not, in turn."""
    rename, turns = Path.rename, iter(fails)

    def failing(self: Path, to: Path) -> Path:
        if next(turns):
            raise error
        return rename(self, to)

    monkeypatch.setattr(Path, "rename", failing)


@pytest.mark.parametrize("fails", [(True,), (False, True, False)])
@pytest.mark.parametrize(
    ("error", "raised"), [(OSError("full"), ExportError), (KeyboardInterrupt(), KeyboardInterrupt)]
)
def test_a_failed_rename_leaves_the_old_bundle(
    finished: tuple[Path, Path],
    monkeypatch: pytest.MonkeyPatch,
    fails: tuple[bool, ...],
    error: BaseException,
    raised: type[BaseException],
) -> None:
    before = snapshot(finished[1].parent)
    failing_renames(monkeypatch, error, *fails)
    with pytest.raises(raised):
        publish(*finished)
    assert snapshot(finished[1].parent) == before
    assert sorted(p.name for p in finished[1].parent.iterdir()) == ["new", "out"]


def test_an_old_bundle_that_cannot_be_moved_back_is_kept(
    finished: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    failing_renames(monkeypatch, OSError("full"), False, True, True)
    with pytest.raises(ExportError, match=r"the old bundle is now (.*)") as caught:
        publish(*finished)
    kept = Path(str(caught.value).split("is now ")[1])
    assert (kept / "manifest.json").read_text() == "out"


def test_an_output_that_appears_during_the_export_is_kept(
    shallow_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def appear(*_: Any) -> None:
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "thesis.tex").write_text("years of work")

    monkeypatch.setattr("eagle3.export.build._write_engines", appear)
    monkeypatch.setattr("eagle3.export.build._finish", lambda *_: None)
    with pytest.raises(ExportError, match=r"thesis\.tex"):
        export_bundle(request_of(shallow_folder, tmp_path / "out", force=True))
    assert snapshot(tmp_path) == {"out/thesis.tex": b"years of work"}


def refuses_to_start(request: ExportRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    def too_late(*_: Any, **__: Any) -> Any:
        raise AssertionError("the output is looked at before anything is loaded")

    monkeypatch.setattr("eagle3.export.build.load_target", too_late)
    with pytest.raises(ExportError) as caught:
        export_bundle(request)
    return str(caught.value)


def test_an_existing_output_needs_force(
    shallow_folder: Path, bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    message = refuses_to_start(request_of(shallow_folder, bundle.root), monkeypatch)
    assert "--force" in message


@pytest.mark.parametrize("output", [".", "..", "/"])
def test_an_output_needs_a_name(
    shallow_folder: Path, monkeypatch: pytest.MonkeyPatch, output: str
) -> None:
    request = request_of(shallow_folder, Path(output), force=True)
    assert "./bundle" in refuses_to_start(request, monkeypatch)


@pytest.mark.parametrize("force", [False, True])
def test_what_is_no_bundle_is_never_replaced(
    shallow_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, force: bool
) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").write_text("years of work")
    (tmp_path / "file").write_text("text")
    before = snapshot(tmp_path)
    for name in ("home", "file"):
        request = request_of(shallow_folder, tmp_path / name, force=force)
        assert name in refuses_to_start(request, monkeypatch)
    inside = request_of(shallow_folder, tmp_path / "file" / "out")
    assert "file" in refuses_to_start(inside, monkeypatch)
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize(
    ("manifest", "says"),
    [
        ('{"name": "a web app"}', "its manifest.json has not the format 'eagle3-bundle'"),
        ("[1]", "its manifest.json has not the format"),
        ("{", "no readable manifest.json"),
        ('{"format": "eagle3-bundle"}', "does not list app;"),
        ('{"format": "eagle3-bundle", "files": 3}', "does not list app;"),
    ],
)
def test_a_folder_with_another_manifest_is_never_replaced(
    shallow_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    manifest: str,
    says: str,
) -> None:
    (tmp_path / "out" / "app").mkdir(parents=True)
    (tmp_path / "out" / "app" / "index.html").write_text("years of work")
    (tmp_path / "out" / "manifest.json").write_text(manifest)
    message = refuses_to_start(
        request_of(shallow_folder, tmp_path / "out", force=True), monkeypatch
    )
    assert says in message and "app" in message


def test_a_bundle_with_a_file_of_its_owner_is_never_replaced(
    shallow_folder: Path, bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(bundle.root, tmp_path / "out")
    (tmp_path / "out" / "notes.txt").write_text("what I measured")
    request = request_of(shallow_folder, tmp_path / "out", force=True)
    assert "does not list notes.txt;" in refuses_to_start(request, monkeypatch)


def test_a_parent_that_cannot_be_written_is_said_first(
    shallow_folder: Path, bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(**_: Any) -> str:
        raise PermissionError("read-only")

    monkeypatch.setattr("tempfile.mkdtemp", refused)
    request = request_of(shallow_folder, bundle.root, force=True)
    assert "cannot be written: read-only" in refuses_to_start(request, monkeypatch)


def test_a_draft_that_is_none_is_said_first(
    shallow_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "empty").mkdir()
    for name, says in (("nowhere", "no such folder"), ("empty", "config.json is missing")):
        request = request_of(
            shallow_folder, tmp_path / "out", drafts=(DraftSource(str(tmp_path / name)),)
        )
        assert says in refuses_to_start(request, monkeypatch)


def test_a_length_that_the_target_does_not_know_is_said_before_its_weights_are_read(
    shallow_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("eagle3.export.target.AutoModelForCausalLM", None)
    plan = tiny.tiny_plan(max_seq_len=513)
    with pytest.raises(ExportError, match=r"max_seq_len 513 .* max_position_embeddings 512"):
        export_bundle(request_of(shallow_folder, tmp_path / "out", plan=plan))


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
    for name, content in snapshot(full_bundle.root).items():
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


# The self-check itself

Check = Callable[[Bundle], tuple[SelfCheck, list[str]]]


@pytest.fixture(scope="module")
def check(llama_folder: Path, head_folder: Path) -> Check:
    """check(bundle): the self-check of an export of `llama` with its head, and what it said."""
    target = load_target(str(llama_folder), "float32")
    head = read_head(head_folder, TargetFacts(tiny.HIDDEN, 64, 8))
    table = target.model.get_input_embeddings().weight.detach()
    draft = HeadDraft(head, build_head(head, DTYPES["float32"]), table)

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
@pytest.mark.parametrize(
    ("dtype", "lowering"), [("float32", "ort"), ("float16", "ort"), ("float16", "portable")]
)
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
        draft_weights="int8", dtype="bfloat16", lowering="portable", backend="ort-cuda"
    )
    bundle = tiny.export_tiny(small_folder, head, tmp_path / "out", plan)
    for name, engine in bundle.manifest.engines.items():
        inferred = str(tmp_path / f"{name}.onnx")
        onnx.shape_inference.infer_shapes_path(
            str(bundle.path(engine.file)), inferred, check_type=True, strict_mode=True
        )
    scales = [t.dtype for n, t in initializers(bundle, "eagle3.draft").items() if "scale" in n]
    assert scales and set(scales) == {ir.DataType.BFLOAT16}
