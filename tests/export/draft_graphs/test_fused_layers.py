"""EAGLE-3 heads that fuse other layers than the paper's three, or feed back a normed hidden."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from plain_head import TOLERANCE, PlainHead, check_draft_tree

import eagle3
from eagle3.export.checks.reference import relative_error
from eagle3.export.heads.head_config import TargetSizes
from eagle3.export.heads.reader import read_head
from eagle3.runtime.bundle.describe import description_lines
from eagle3.runtime.bundle.folder import Bundle
from eagle3.runtime.errors import CheckpointError
from eagle3.runtime.ort.draft_engine import DraftEngine
from eagle3.runtime.ort.target_engine import TargetEngine
from eagle3.runtime.stats import Clock

NUM_LAYERS = 2
FACTS = TargetSizes(hidden_size=tiny.HIDDEN, vocab_size=64, num_layers=NUM_LAYERS)
PROMPT = list(range(5, 19))
# fused layers, norm_output. The last index is the final hidden, after the last norm.
VARIANTS = [((NUM_LAYERS,), False), ((1,), True), ((0, NUM_LAYERS), False)]


@pytest.fixture(scope="module")
def shallow() -> Any:
    model = tiny.tiny_model("llama", num_layers=NUM_LAYERS, scale=2.0)
    tiny.jitter_vectors(model)
    return model


@pytest.fixture(scope="module", params=VARIANTS, ids=str)
def variant(
    request: pytest.FixtureRequest, shallow: Any, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Bundle, tuple[int, ...]]:
    """The folder of a head, its bundle, its fused layers."""
    layers, norm_output = request.param
    folder = tmp_path_factory.mktemp("variant")
    options: dict[str, Any] = {"draft_vocab_size": 40, "aux_layer_ids": layers}
    head = tiny.save_head(folder / "head", shallow, **options, norm_output=norm_output)
    target = tiny.save_target(folder / "target", shallow)
    return head, tiny.export_tiny(target, head, folder / "bundle"), layers


def test_draft_steps_are_those_of_a_plain_loop(
    shallow: Any, variant: tuple[Path, Bundle, tuple[int, ...]]
) -> None:
    """From the engine's own features, which are transformers' hidden_states."""
    head, bundle, layers = variant
    with torch.no_grad():
        out = shallow(torch.tensor([PROMPT]), use_cache=False, output_hidden_states=True)
    assert len(out.hidden_states) == NUM_LAYERS + 1
    expected = torch.cat([out.hidden_states[i] for i in layers], -1)[0].numpy()
    features = TargetEngine(bundle, 1, Clock()).prefill(np.array(PROMPT), 0, False).features
    assert features is not None and features.shape == (len(PROMPT), len(layers) * tiny.HIDDEN)
    assert relative_error(features, expected) < TOLERANCE
    plain = PlainHead(head, shallow.get_input_embeddings().weight)
    ids = read_head(head, FACTS).target_ids
    check_draft_tree(DraftEngine(bundle, 1, Clock()), plain, ids, features.copy())


def test_the_final_hidden_is_normed(shallow: Any) -> None:
    """What index L means: the output of the last layer behind the last norm."""
    with torch.no_grad():
        out = shallow(torch.tensor([PROMPT]), use_cache=False, output_hidden_states=True)
        logits = shallow.lm_head(out.hidden_states[NUM_LAYERS])
    assert torch.equal(logits, out.logits)


def test_the_text_is_that_of_plain_decoding(variant: tuple[Path, Bundle, tuple[int, ...]]) -> None:
    engine = eagle3.load(variant[1].root, threads=1)
    options: dict[str, Any] = {"max_new_tokens": 40, "logit_bias": {1: -100.0}}
    plain = engine.generate(PROMPT, drafter="none", **options)
    assert engine.generate(PROMPT, draft_top_k=3, **options).token_ids == plain.token_ids


def test_the_manifest_says_what_is_fused_and_fed_back(
    variant: tuple[Path, Bundle, tuple[int, ...]],
) -> None:
    _, bundle, layers = variant
    assert bundle.manifest.target.aux_layer_ids == layers
    assert bundle.manifest.draft is not None
    convention = bundle.manifest.draft.conventions["norm_output"]
    assert convention.value is (layers == (1,)) and convention.source == "config"
    assert any(f"norm_output = {layers == (1,)}" in line for line in description_lines(bundle))


def test_a_head_that_names_too_few_layers_says_what_its_fc_reads(
    shallow: Any, tmp_path: Path
) -> None:
    """Without eagle_config the default is three; the fc of this one reads one."""
    head = tiny.save_head(tmp_path / "head", shallow, aux_layer_ids=(NUM_LAYERS,))
    config = json.loads((head / "config.json").read_text())
    del config["eagle_config"]
    (head / "config.json").write_text(json.dumps(config))
    deep = TargetSizes(tiny.HIDDEN, 64, num_layers=8)
    with pytest.raises(
        CheckpointError, match=r"fc.weight is \[32, 32\].* \[32, 96\].*--aux-layers"
    ):
        read_head(head, deep)
    assert read_head(head, deep, (8,)).config.aux_layer_ids == (8,)
