"""A head that another reading of its checkpoint would fit clearly better."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file

from eagle3.export.checks.readings import (
    AnsweredText,
    Reading,
    _clearly_better,
    _Score,
    causal_attention,
    compare_readings,
    neighbours,
)
from eagle3.export.checks.self_check import SelfCheck
from eagle3.export.draft_graphs.head_modules import build_head
from eagle3.export.drafts.draft_source import DraftSource
from eagle3.export.exporter import ExportRequest, export_bundle
from eagle3.export.heads.head_config import Head, TargetSizes
from eagle3.export.heads.reader import read_head
from eagle3.export.targets.target import Target, load_target

LAYERS = (2, 4, 5)
FACTS = TargetSizes(hidden_size=tiny.HIDDEN, vocab_size=64, num_layers=8)


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A Llama whose layers add little to their input, so that its texts can be learned."""
    model = tiny.tiny_model("llama", scale=2.0)
    for name, parameter in model.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            parameter.data.mul_(0.3)
    return model


@pytest.fixture(scope="module")
def calm_folder(calm: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save_target(tmp_path_factory.mktemp("calm"), calm)


@pytest.fixture(scope="module")
def target(calm_folder: Path) -> Target:
    return load_target(str(calm_folder), "float32", trust_remote_code=False, max_seq_len=128)


def greedy_texts(model: Any, prompts: torch.Tensor) -> list[AnsweredText]:
    """Greedy answers of 48 tokens to prompts [B,P]."""
    with torch.no_grad():
        ids = model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            max_new_tokens=48,
            min_new_tokens=48,
            do_sample=False,
            pad_token_id=0,
        )
    return [AnsweredText(row, prompts.shape[1]) for row in ids.numpy()]


@pytest.fixture(scope="module")
def texts(calm: Any) -> list[AnsweredText]:
    """Of prompts that the tokenizer knows no word of, which an export's are, and of others."""
    unknown = [each for n in range(5, 20) for each in greedy_texts(calm, torch.zeros(1, n).long())]
    generator = torch.Generator().manual_seed(3)
    return unknown + greedy_texts(calm, torch.randint(2, 64, (8, 4), generator=generator))


@pytest.fixture(scope="module")
def fitted_folder(
    calm: Any, texts: list[AnsweredText], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A head that knows `texts` by heart, with the features of layers 2, 4 and 5."""
    folder = tmp_path_factory.mktemp("fitted")
    tiny.save_head(folder, calm, aux_layer_ids=LAYERS)
    module = build_head(read_head(folder, FACTS), torch.float32).requires_grad_(True)
    tokens = torch.from_numpy(np.stack([text.tokens[-52:] for text in texts]))
    with torch.no_grad():
        hidden = calm(tokens, output_hidden_states=True).hidden_states
        features = torch.cat([hidden[i][:, :-1] for i in LAYERS], -1)
        embedding = calm.get_input_embeddings()(tokens[:, 1:])
    positions = torch.arange(features.shape[1])[None]
    optimizer = torch.optim.Adam(module.parameters(), 3e-3)
    for _ in range(150):
        out = module(embedding, module.fuse(features), positions, causal_attention)
        logits = module.logits(out[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 2:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    weights = load_file(folder / "model.safetensors")
    fitted = {k: v.detach() for k, v in module.state_dict().items() if k in weights}
    save_file({**weights, **fitted}, folder / "model.safetensors")
    return folder


def read(folder: Path, layers: tuple[int, ...] | None) -> Head:
    return read_head(folder, FACTS, layers)


def test_the_right_layers_are_found_from_either_side(
    target: Target, texts: list[AnsweredText], fitted_folder: Path
) -> None:
    right = compare_readings(read(fitted_folder, None), target, texts)
    assert right[0].acceptance > 0.5 and not any(each.clearly_better for each in right)
    for shifted in ((1, 3, 4), (3, 5, 6)):
        readings = compare_readings(read(fitted_folder, shifted), target, texts)
        better = [each.name for each in readings if each.clearly_better]
        assert better == ["aux layers 2,4,5"]
        measured = {each.name: each.acceptance for each in readings}
        assert measured["aux layers 2,4,5"] == right[0].acceptance > readings[0].acceptance


def test_an_export_of_shifted_layers_says_so_with_both_numbers(
    calm_folder: Path, fitted_folder: Path, tmp_path: Path
) -> None:
    request = ExportRequest(
        target=str(calm_folder),
        drafts=(DraftSource(str(fitted_folder)),),
        output=tmp_path / "out",
        plan=tiny.tiny_plan(),
        aux_layer_ids=(1, 3, 4),
    )
    bundle, check = export_bundle(request)
    said = [w for w in check.warnings if "read better with aux layers 2,4,5" in w]
    assert len(said) == 1
    assert bundle.manifest.draft is not None
    recorded = bundle.manifest.draft.checks["readings"]
    for name in ("as resolved", "aux layers 2,4,5"):
        assert f"{recorded[name]:.1%}" in said[0]


def test_d2t_is_tried_the_other_way_where_it_can_be(calm: Any, tmp_path: Path) -> None:
    """Not where t2d decides, and not where the values are no ids."""
    folder = tiny.save_head(tmp_path / "a", calm, draft_vocab_size=8)
    assert not any("d2t" in name for name, _ in neighbours(read(folder, None)))
    weights = load_file(folder / "model.safetensors")
    del weights["t2d"]
    ids = torch.arange(1, 9)
    save_file({**weights, "d2t": ids}, folder / "model.safetensors")
    for said, other, expected in (
        ("offsets", "absolute", ids),
        ("absolute", "offsets", ids + torch.arange(8)),
    ):
        head = read_head(folder, FACTS, None, {"d2t": said})
        assert dict(neighbours(head))[f"d2t={other}"].target_ids.tolist() == expected.tolist()
    save_file({**weights, "d2t": ids // 2}, folder / "model.safetensors")
    assert not any("d2t" in name for name, _ in neighbours(read(folder, None)))


def test_layers_out_of_range_are_no_neighbours(fitted_folder: Path) -> None:
    names = [name for name, _ in neighbours(read(fitted_folder, (0, 4, 8)))]
    assert not any(name.startswith("aux layers") for name in names)


def test_answers_too_short_to_judge_give_no_readings(target: Target, fitted_folder: Path) -> None:
    short = AnsweredText(np.array([2, 3, 4], np.int64), 2)
    assert compare_readings(read(fitted_folder, None), target, [short]) == ()


def score(probabilities: list[float]) -> _Score:
    values = np.array(probabilities)
    return _Score(values > 0.5, values)


def test_a_gain_within_the_noise_is_not_clear() -> None:
    rng = np.random.default_rng(0)
    own = rng.random(200)
    noise = np.clip(own + rng.normal(0, 0.2, 200), 0, 1)
    assert not _clearly_better(score(noise.tolist()), score(own.tolist()))
    better = np.clip(own + 0.1 + rng.normal(0, 0.2, 200), 0, 1)
    assert _clearly_better(score(better.tolist()), score(own.tolist()))
    assert not _clearly_better(score(own.tolist()), score(own.tolist()))


def test_a_better_reading_is_a_warning() -> None:
    check = SelfCheck(
        drafts={"eagle3": {"first_position_acceptance": 0.4}},
        readings={"eagle3": (Reading("as resolved", 0.4, 0.3), Reading("x", 0.5, 0.4, True))},
    )
    assert len(check.warnings) == 1
    assert (
        "x" in check.warnings[0] and "50.0%" in check.warnings[0] and "40.0%" in check.warnings[0]
    )
