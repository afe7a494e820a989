"""Builds of layers of the demo's target and of its head: a vocabulary of 49,152, tied weights."""

from __future__ import annotations

from pathlib import Path

import pytest

import eagle3
from eagle3.export import exporter as build
from eagle3.export.checks.self_check import SelfCheck
from eagle3.export.drafts.draft_source import DraftSource
from eagle3.export.exporter import ExportRequest, export_bundle
from eagle3.export.targets.target import Target, load_target
from eagle3.plans.plan import Plan
from eagle3.plans.tensorrt.build_request import BuildRequest
from eagle3.plans.tensorrt.plan_builder import build_bundle
from eagle3.plans.tensorrt.plan_files import LayerCounts
from eagle3.plans.tree_plan import TreePlan

pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX is not installed")
pytest.importorskip("polygraphy", reason="polygraphy is not installed")

_DEMO = Path(eagle3.__file__).parent / "demo"
_TARGET = _DEMO / "cache" / "SmolLM2-135M-Instruct.Q4_1.gguf"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        not _TARGET.is_file(), reason=f"{_TARGET} is missing: `make demo` downloads it"
    ),
]


@pytest.fixture(scope="module")
def smollm() -> Target:
    return load_target(str(_TARGET), "float16")


def shortened(target: Target, num_layers: int, folder: Path) -> Path:
    """A checkpoint of the first layers."""
    config = {**target.config.to_dict(), "num_hidden_layers": num_layers, "layer_types": None}
    model = type(target.model)(type(target.config)(**config))
    model.load_state_dict(target.model.state_dict(), strict=False)
    model.to(target.model.dtype).save_pretrained(folder)
    target.tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(("dtype", "num_layers"), [("float16", 8), ("bfloat16", 4)])
def test_layers_of_the_demo_compile(
    smollm: Target, dtype: str, num_layers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All layers are alike; to a compiler the sizes of one and of the vocabulary matter."""
    monkeypatch.setattr(build, "check_bundle", lambda *_: SelfCheck())
    target = str(shortened(smollm, num_layers, tmp_path / "target"))
    plan = Plan(tree=TreePlan(3, 3, 5), dtype=dtype, lowering="portable", backend="ort-cuda")
    draft = DraftSource(str(_DEMO / "head"))
    layers = (0, num_layers // 2, num_layers)
    request = ExportRequest(target, (draft,), tmp_path / "bundle", plan, aux_layer_ids=layers)
    bundle, _ = export_bundle(request)
    files = {f.engine: f for f in build_bundle(bundle.root, BuildRequest(compute_capability="8.9"))}
    assert set(files) == set(bundle.manifest.engines)
    counts, head = files["target"].counts, files["eagle3.draft"].counts
    assert counts == LayerCounts(2 * num_layers, num_layers, num_layers)
    assert head == LayerCounts(2, 1, 1)
    # Each profile shares the weights: the file is little more than they are.
    weights = bundle.manifest.files["target.onnx.data"].size
    assert weights < files["target"].size < 1.2 * weights
    assert files["target"].profiles[0].ranges["tree_mask"] == ((1, 1, 1), (1, 6, 6), (1, 65, 65))
    assert files["target"].profiles[1].ranges["tree_mask"][2] == (1, 128, 128)
