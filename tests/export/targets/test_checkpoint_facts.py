"""Facts of checkpoints: counted as the models that transformers makes have them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch

from eagle3.export.targets import checkpoint_facts as model_facts
from eagle3.export.targets.checkpoint_facts import draft_facts, facts_of_model, target_facts
from eagle3.plans.facts import Attention
from eagle3.runtime.errors import CheckpointError, ExportError, UnsupportedModel

MIXTURE = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2}


@pytest.mark.parametrize("architecture", sorted(tiny.ARCHITECTURES))
def test_a_target_is_counted_without_its_weights(architecture: str, tmp_path: Path) -> None:
    model = tiny.tiny_model(architecture, num_layers=3)
    model.config.save_pretrained(tmp_path)
    facts = target_facts(str(tmp_path))
    count = sum(parameter.numel() for parameter in model.parameters())
    assert facts.num_parameters == count
    table = 64 * 32
    assert facts.embedding_parameters == table
    assert facts.tied == (architecture == "gemma3_text")
    # All that is left is the last norm.
    assert count - facts.layer_parameters - table * (1 if facts.tied else 2) == 32
    assert facts.attention == Attention(3, 4, 2, 8)
    assert (facts.intermediate_size, facts.experts) == (64, None)


@pytest.mark.parametrize("architecture", ["mixtral", "qwen3_moe"])
def test_a_mixtures_experts_are_told_apart(architecture: str) -> None:
    model = tiny.tiny_model(
        architecture, num_layers=2, head_dim=8, moe_intermediate_size=16, **MIXTURE
    )
    facts = facts_of_model(model, "mixture")
    width = 64 if architecture == "mixtral" else 16
    assert facts.experts is not None
    assert facts.experts.parameters == 2 * 4 * 3 * 32 * width
    assert facts.experts.active_parameters == facts.experts.parameters / 2
    router = 2 * 4 * 32
    attention = 2 * (2 * 32 * 32 + 2 * 32 * 16)
    assert router + attention < facts.dense_parameters < router + attention + 400  # and norms


def test_a_mixture_that_does_not_say_how_many_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.tiny_model("mixtral", num_layers=1, **MIXTURE)
    monkeypatch.setattr(model_facts, "_EXPERTS_PER_TOKEN", ("another_name",))
    with pytest.raises(UnsupportedModel, match="MixtralForCausalLM: it has experts, but"):
        facts_of_model(model, "mixture")


@pytest.mark.parametrize(
    ("key", "value"), [("kv_lora_rank", 8), ("num_kv_shared_layers", 2), ("layer_types", ["ssm"])]
)
def test_a_cache_of_another_kind_is_refused(llama: Any, key: str, value: Any) -> None:
    model = tiny.tiny_model("llama", num_layers=1)
    setattr(model.config, key, value)
    with pytest.raises(UnsupportedModel, match="LlamaForCausalLM: its cache is not one of keys"):
        facts_of_model(model, "target")


def test_a_head_is_read_off_its_shapes(llama_folder: Path, head_folder: Path) -> None:
    facts = draft_facts(str(head_folder), target_facts(str(llama_folder)))
    assert facts.fuse_parameters == 32 * 96
    layer = 32 * 64 + 2 * 16 * 64 + 32 * 32 + 3 * 32 * 48
    assert facts.step_parameters == layer
    assert (facts.lm_head_parameters, facts.own_lm_head) == (40 * 32, True)
    assert (facts.draft_vocab_size, facts.feature_size) == (40, 96)
    assert facts.attention == Attention(1, 4, 2, 8)


def test_an_eagle_1_head_reads_the_targets_lm_head(
    llama: Any, llama_folder: Path, tmp_path: Path
) -> None:
    head = tiny.save_eagle1_head(tmp_path, llama)
    facts = draft_facts(str(head), target_facts(str(llama_folder)))
    assert (facts.fuse_parameters, facts.own_lm_head) == (0, False)
    layer = 32 * 32 + 2 * 16 * 32 + 32 * 32 + 3 * 32 * 48
    assert facts.step_parameters == layer + 32 * 64  # fc is read at every step
    assert (facts.draft_vocab_size, facts.lm_head_parameters) == (64, 64 * 32)
    assert facts.feature_size == 32


def test_a_bin_file_gives_its_shapes_and_runs_nothing(
    llama: Any, llama_folder: Path, head_folder: Path, tmp_path: Path
) -> None:
    raw = tiny.head_config(llama, draft_vocab_size=40)
    (tmp_path / "config.json").write_bytes((head_folder / "config.json").read_bytes())
    torch.save(tiny.head_weights(llama, raw), tmp_path / "pytorch_model.bin")
    target = target_facts(str(llama_folder))
    facts = draft_facts(str(tmp_path), target)
    assert facts.step_parameters == draft_facts(str(head_folder), target).step_parameters
    torch.save({"fc.weight": _Payload(tmp_path / "ran")}, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="contains more than tensors and is refused"):
        draft_facts(str(tmp_path), target)
    assert not (tmp_path / "ran").exists()


class _Payload:
    """Touches a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_what_is_no_target_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="no such folder or file"):
        target_facts(str(tmp_path / "none"))
    (tmp_path / "config.json").write_text('{"model_type": "nothing"}')
    with pytest.raises(ExportError, match="cannot be loaded"):
        target_facts(str(tmp_path))
