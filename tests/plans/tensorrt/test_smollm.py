"""The demo's target and head, compiled: 30 layers, a vocabulary of 49,152, shared embeddings."""

from __future__ import annotations

from pathlib import Path

import pytest

import eagle3
from eagle3.export import exporter as build
from eagle3.export.checks.self_check import SelfCheck
from eagle3.export.drafts.draft_source import DraftSource
from eagle3.export.exporter import ExportRequest, export_bundle
from eagle3.plans.plan import Plan
from eagle3.plans.tensorrt.build_request import BuildRequest
from eagle3.plans.tensorrt.plan_builder import build_bundle
from eagle3.plans.tree_plan import TreePlan

pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX is not installed")
pytest.importorskip("polygraphy", reason="polygraphy is not installed")

_DEMO = Path(eagle3.__file__).parent / "demo"
_TARGET = _DEMO / "cache" / "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(not _TARGET.is_file(), reason=f"{_TARGET} is not there: make demo fetches it")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_the_demo_compiles(dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the comparison with PyTorch: a CPU is slow in float16 and has no bfloat16."""
    monkeypatch.setattr(build, "check_bundle", lambda *_: SelfCheck())
    plan = Plan(tree=TreePlan(3, 3, 5), dtype=dtype, lowering="portable", backend="ort-cuda")
    draft = DraftSource(str(_DEMO / "head"))
    request = ExportRequest(str(_TARGET), (draft,), tmp_path / "bundle", plan)
    bundle, _ = export_bundle(request)
    files = {f.engine: f for f in build_bundle(bundle.root, BuildRequest(compute_capability="8.9"))}
    assert set(files) == set(bundle.manifest.engines)
    target, head = files["target"].counts, files["eagle3.draft"].counts
    assert (target.cache_updates, target.attentions, target.fused_attentions) == (60, 30, 30)
    assert (head.cache_updates, head.attentions, head.fused_attentions) == (2, 1, 1)
    # Each profile shares the weights: the file is little more than they are.
    weights = bundle.manifest.files["target.onnx.data"].size
    assert weights < files["target"].size < 1.2 * weights
    assert files["target"].profiles[0].ranges["tree_mask"] == ((1, 1, 1), (1, 6, 6), (1, 65, 65))
    assert files["target"].profiles[1].ranges["tree_mask"][2] == (1, 128, 128)
