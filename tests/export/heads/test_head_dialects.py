"""Reading heads of four dialects: what each value resolves to, and every trap of the formats.

The traps are numbered as people met them: a residual that is normed or not, two norms that exclude
each other, a key with two meanings, layer ids counted in two ways, ...
"""

from __future__ import annotations

import contextlib
import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from dialects import Written
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from eagle3.export.draft_graphs.head_modules import build_head
from eagle3.export.heads.head_config import AUX_LAYERS, Head, TargetSizes
from eagle3.export.heads.reader import read_head, reread
from eagle3.runtime.errors import CheckpointError

FACTS = TargetSizes(hidden_size=tiny.HIDDEN, vocab_size=64, num_layers=8)
NAMES = ("official", "specforge", "speculators")


class Checkpoint:
    """A head's folder that a test may damage before it is read."""

    def __init__(self, folder: Path, model: Any, written: Written) -> None:
        self.folder = written.save(folder, model)
        self.config: dict[str, Any] = json.loads((folder / "config.json").read_text())
        self.weights: dict[str, Tensor] = load_file(folder / "model.safetensors")

    def read(self, facts: TargetSizes = FACTS, **assume: str) -> Head:
        (self.folder / "config.json").write_text(json.dumps(self.config))
        save_file(self.weights, self.folder / "model.safetensors")
        return read_head(self.folder, facts, None, assume)

    def refusal(self, facts: TargetSizes = FACTS, **assume: str) -> str:
        with pytest.raises(CheckpointError) as caught:
            self.read(facts, **assume)
        return str(caught.value)


@pytest.fixture
def write(tmp_path: Path, llama: Any) -> Any:
    def written(dialect: str, **options: Any) -> Checkpoint:
        options = {"layers": (1, 3, 6), **options}
        return Checkpoint(tmp_path / "head", llama, Written(dialect, **options))

    return written


# Recognition


@pytest.mark.parametrize(
    ("dialect", "name", "source"),
    [
        ("official", "eagle3-official", "tensors"),
        ("specforge", "specforge", "config (architectures)"),
        ("speculators", "speculators", "config (transformer_layer_config)"),
    ],
)
def test_a_dialect_is_recognised(write: Any, dialect: str, name: str, source: str) -> None:
    config = write(dialect).read().config
    assert (config.dialect, config.method, config.drafter) == (name, "eagle3", "eagle3")
    assert (config.conventions["dialect"].value, config.conventions["dialect"].source) == (
        name,
        source,
    )


def test_a_head_of_this_project_is_official(write: Any) -> None:
    head = write("specforge", norm_output=True)
    head.config["trained_by"] = "eagle3 0.1.0"
    config = head.read().config
    assert config.dialect == "eagle3-official" and config.norm_output


def test_tensors_and_config_of_different_dialects(write: Any) -> None:
    """The layer's name alone does not tell what norm_before_residual and layer ids default to."""
    head = write("official")
    head.weights = {n.replace("midlayer", "layers.0"): t for n, t in head.weights.items()}
    assert "--assume dialect=official|specforge|speculators" in head.refusal()
    assert not head.read(dialect="official").config.norm_before_residual
    config = head.read(dialect="speculators").config
    assert config.norm_before_residual
    assert config.conventions["dialect"].source == "flag"
    assert "midlayer.hidden_norm.weight" in head.read(dialect="official").weights


def test_what_is_no_eagle_head(write: Any) -> None:
    head = write("official")
    head.weights = {n.replace("midlayer", "model.layers.5"): t for n, t in head.weights.items()}
    assert "not an EAGLE head" in head.refusal()
    head = write("speculators")
    head.config["speculators_model_type"] = "mtp"
    assert "speculators_model_type is 'mtp'" in head.refusal()
    head.config |= {"speculators_model_type": "eagle3", "transformer_layer_config": None}
    assert "has no transformer_layer_config" in head.refusal()


def test_a_layer_of_an_unknown_model_is_refused(write: Any) -> None:
    """Its norms may add one to their weights, as Gemma's do."""
    head = write("speculators")
    head.config["transformer_layer_config"]["model_type"] = "gemma3_text"
    assert "model_type 'gemma3_text'" in head.refusal()


# Trap 1


@pytest.mark.parametrize(("dialect", "default"), [*zip(NAMES, (False, False, True), strict=True)])
def test_the_residual_is_the_dialects_unless_it_is_said(
    write: Any, dialect: str, default: bool
) -> None:
    head = write(dialect)
    config = head.read().config
    assert config.norm_before_residual is default
    assert config.conventions["norm_before_residual"].source == "dialect default"
    head.config["norm_before_residual"] = not default
    config = head.read().config
    assert config.norm_before_residual is not default
    assert config.conventions["norm_before_residual"].source == "config"
    config = head.read(norm_before_residual=str(default).lower()).config
    assert config.norm_before_residual is default
    assert config.conventions["norm_before_residual"].source == "flag"


# Trap 2


@pytest.mark.parametrize("dialect", NAMES)
def test_two_norms_in_front_of_fc_exclude_each_other(write: Any, dialect: str) -> None:
    message = write(dialect, norm_before_fc=True, fc_norm=True).refusal()
    assert "norm_before_fc" in message and "fc_norm" in message and "exclusive" in message


@pytest.mark.parametrize("dialect", NAMES)
@pytest.mark.parametrize(
    ("key", "tensor"), [("norm_before_fc", "input_norm.weight"), ("fc_norm", "fc_norm.1.weight")]
)
def test_a_norm_is_where_its_weights_are(write: Any, dialect: str, key: str, tensor: str) -> None:
    head = write(dialect, **{key: True})
    assert head.read().config.conventions[key].source == "config"
    del head.config[key]
    config = head.read().config
    assert getattr(config, key) and config.conventions[key].source == "tensors"
    head.config[key] = False
    assert tensor in head.refusal() and "unexpected" in head.refusal()
    assert getattr(head.read(**{key: "true"}).config, key)
    head.config[key] = True
    head.weights[tensor] = torch.ones(7)
    assert f"{tensor} is [7], the config requires" in head.refusal()
    del head.weights[tensor]
    assert f"missing ['{tensor}']" in head.refusal()


def test_a_switch_inside_eagle_config(write: Any) -> None:
    head = write("official", norm_before_fc=True)
    del head.config["norm_before_fc"]
    head.config["eagle_config"]["norm_before_fc"] = True
    assert head.read().config.conventions["norm_before_fc"].source == "config"
    head.config["norm_before_fc"] = False
    assert "norm_before_fc twice: False, True" in head.refusal()


# Trap 3


@pytest.mark.parametrize("stored", [True, False])
def test_specforges_norm_output_is_the_users_to_say(write: Any, stored: bool) -> None:
    head = write("specforge", norm_output=stored)
    message = head.refusal()
    assert f"norm_output {stored}" in message and "--assume norm_output=" in message
    for said in (True, False):
        config = head.read(norm_output=str(said).lower()).config
        assert config.norm_output is said
        assert config.conventions["norm_output"].source == "flag"
    del head.config["norm_output"]
    assert not head.read().config.norm_output


@pytest.mark.parametrize("dialect", ["official", "speculators"])
def test_elsewhere_norm_output_is_what_is_fed_back(write: Any, dialect: str) -> None:
    config = write(dialect, norm_output=True).read().config
    assert config.norm_output and config.conventions["norm_output"].source == "config"


# Trap 4


@pytest.mark.parametrize(("dialect", "counts"), [*zip(NAMES, (-1, -1, 0), strict=True)])
def test_layer_ids_are_counted_as_the_dialect_counts(write: Any, dialect: str, counts: int) -> None:
    head = write(dialect)
    holder = head.config if dialect == "speculators" else head.config["eagle_config"]
    assert holder["eagle_aux_hidden_state_layer_ids"] == [i + counts for i in (1, 3, 6)]
    config = head.read().config
    assert config.aux_layer_ids == (1, 3, 6)
    words = {-1: "layer outputs, plus one", 0: "hidden_states indices"}[counts]
    assert config.conventions[AUX_LAYERS].source == f"config ({words})"
    other = {-1: "inputs", 0: "outputs"}[counts]
    config = head.read(layer_ids=other).config
    assert config.aux_layer_ids == tuple(i + (1 if counts == 0 else -1) for i in (1, 3, 6))
    assert config.conventions[AUX_LAYERS].source.startswith("flag (")


@pytest.mark.parametrize("dialect", NAMES)
def test_the_default_layers_are_the_same_in_every_dialect(write: Any, dialect: str) -> None:
    """[1, L/2 - 1, L - 4] of those that count outputs, [2, L/2, L - 3] of the others."""
    head = write(dialect)
    for holder in (head.config, head.config.get("eagle_config", {})):
        holder.pop("eagle_aux_hidden_state_layer_ids", None)
    config = head.read(replace(FACTS, num_layers=32)).config
    assert config.aux_layer_ids == (2, 16, 29)
    assert config.conventions[AUX_LAYERS].source == "dialect default"
    assert "6 layers" in head.refusal(replace(FACTS, num_layers=6))  # trap 11


# Traps 5 and 6


@pytest.mark.parametrize("dialect", NAMES)
def test_a_full_vocabulary_has_no_mapping(write: Any, dialect: str) -> None:
    head = write(dialect, draft_vocab=None)
    read = head.read()
    assert np.array_equal(read.target_ids, np.arange(64))
    assert read.config.conventions["d2t"].source == "tensors"
    head.config["draft_vocab_size"] = 40
    head.weights["lm_head.weight"] = head.weights["lm_head.weight"][:40].contiguous()
    assert "missing ['d2t']" in head.refusal()


@pytest.mark.parametrize("dialect", NAMES)
def test_absolute_ids_are_read_on_the_users_word_alone(write: Any, dialect: str) -> None:
    head = write(dialect)
    expected = head.read().target_ids
    head.weights["d2t"] = torch.from_numpy(expected.copy())
    assert "--assume d2t=absolute" in head.refusal()
    assert np.array_equal(head.read(d2t="absolute").target_ids, expected)


# Trap 7


@pytest.mark.parametrize("dialect", NAMES)
def test_rope_is_the_heads_own(write: Any, dialect: str) -> None:
    scaling = {"rope_type": "linear", "factor": 2.0}
    head = write(dialect, rope_theta=700.0, rope_scaling=scaling)
    config = head.read().config
    assert config.rope == {**scaling, "rope_theta": 700.0}
    assert config.conventions["rope"].value == config.rope
    head = write(dialect, rope_theta=None)
    config = head.read().config
    assert config.rope == {"rope_type": "default", "rope_theta": 10000.0}
    assert config.conventions["rope"].source == "dialect default (rope_theta)"


# Traps 8 and 9


@pytest.mark.parametrize("dialect", NAMES)
def test_a_head_with_a_width_of_its_own_has_its_own_embedding(write: Any, dialect: str) -> None:
    head = write(dialect, hidden=24, embedding="random")
    read = head.read()
    assert (read.config.hidden_size, read.config.target_width) == (24, tiny.HIDDEN)
    assert torch.equal(read.own_embedding, head.weights["embed_tokens.weight"])
    assert "own" in read.config.conventions["embedding"].value
    assert build_head(read, torch.float32).fc.weight.shape == (24, 3 * tiny.HIDDEN)
    assert "target_hidden_size 32 is not the target's hidden_size 40" in head.refusal(
        replace(FACTS, hidden_size=40)
    )
    table = head.weights.pop("embed_tokens.weight")
    assert "missing ['embed_tokens.weight']" in head.refusal()
    head.weights["embed_tokens.weight"] = torch.randn(64, tiny.HIDDEN)
    assert "embed_tokens.weight is [64, 32], the config requires [64, 24]" in head.refusal()
    head.weights["embed_tokens.weight"] = table
    del head.config["target_hidden_size"]
    message = head.refusal()
    assert "hidden_size 24 is not the target's hidden_size 32" in message
    assert "target_hidden_size" in message


@pytest.mark.parametrize("dialect", NAMES)
@pytest.mark.parametrize(("kind", "says"), [("copy", "equals"), ("random", "differs")])
def test_an_embedding_in_the_head_does_not_override_the_targets(
    write: Any, llama: Any, dialect: str, kind: str, says: str
) -> None:
    table = llama.get_input_embeddings().weight
    head = write(dialect, embedding=kind)
    read = head.read(replace(FACTS, embedding=table))
    assert read.own_embedding is None
    said = read.config.conventions["embedding"]
    assert f"copy {says}" in said.value and "not read" in said.value
    assert said.source == "dialect default"
    assert "was not compared" in head.read().config.conventions["embedding"].value
    read = head.read(embedding="own")
    assert torch.equal(read.own_embedding, head.weights["embed_tokens.weight"])
    assert read.config.conventions["embedding"].source == "flag"
    del head.weights["embed_tokens.weight"]
    assert head.read().config.conventions["embedding"].value == "the target's"
    assert "missing ['embed_tokens.weight']" in head.refusal(embedding="own")


def test_an_embedding_that_was_trained_is_the_users_to_say(write: Any, llama: Any) -> None:
    known = replace(FACTS, embedding=llama.get_input_embeddings().weight)
    head = write("speculators", embedding="random")
    head.config["embed_requires_grad"] = True
    assert "embed_requires_grad" in head.refusal(known) and "differs" in head.refusal(known)
    assert head.read(known, embedding="own").own_embedding is not None
    assert head.read(known, embedding="target").own_embedding is None
    head = write("speculators", embedding="copy")
    head.config["embed_requires_grad"] = True
    assert head.read(known).own_embedding is None


def test_tied_embeddings_mean_nothing_for_a_reduced_vocabulary(write: Any) -> None:
    head = write("specforge", embedding="copy")
    head.config["tie_word_embeddings"] = True
    assert head.read().config.conventions["lm_head"].value == "the head's own"


def test_tied_embeddings_of_a_full_vocabulary(write: Any) -> None:
    head = write("specforge", embedding="copy", draft_vocab=None)
    head.config["tie_word_embeddings"] = True
    assert "--assume lm_head=own or lm_head=embedding" in head.refusal()
    own, table = head.weights["lm_head.weight"], head.weights["embed_tokens.weight"]
    assert torch.equal(head.read(lm_head="own").weights["lm_head.weight"], own)
    assert torch.equal(head.read(lm_head="embedding").weights["lm_head.weight"], table)
    del head.weights["lm_head.weight"]
    read = head.read()
    assert torch.equal(read.weights["lm_head.weight"], table)
    assert read.config.conventions["lm_head"].source == "config (tie_word_embeddings)"
    head.config["tie_word_embeddings"] = False
    assert "missing ['lm_head.weight']" in head.refusal()


def test_a_head_dim_of_its_own(write: Any) -> None:
    head = write("speculators", head_dim=16)
    assert head.read().config.head_dim == 16
    del head.config["transformer_layer_config"]["head_dim"]
    assert "q_proj.weight is [64, 64], the config requires [32, 64]" in head.refusal()
    config = head.read(head_dim="16").config
    assert config.head_dim == 16 and config.conventions["head_dim"].source == "flag"
    head.config["transformer_layer_config"]["head_dim"] = 15
    assert "head_dim 15 is odd" in head.refusal()


# Trap 10


@pytest.mark.parametrize("dialect", NAMES)
def test_normed_queries_and_keys_are_part_of_the_head(write: Any, dialect: str) -> None:
    head = write(dialect, qk_norm=True)
    config = head.read().config
    source = "config (model_type)" if dialect == "speculators" else "tensors"
    assert config.qk_norm and config.conventions["qk_norm"].source == source
    del head.weights[
        f"{'layers.0' if dialect == 'speculators' else 'midlayer'}.self_attn.k_norm.weight"
    ]
    assert "k_norm.weight" in head.refusal() and "missing" in head.refusal()


def test_a_llama_layer_of_speculators_has_no_normed_queries(write: Any) -> None:
    head = write("speculators", qk_norm=True)
    head.config["transformer_layer_config"]["model_type"] = "llama"
    assert "unexpected ['layers.0.self_attn.k_norm.weight'" in head.refusal()
    assert head.read(qk_norm="true").config.qk_norm


# Keys


@pytest.mark.parametrize("dialect", NAMES)
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("sliding_window", 4096),
        ("layer_types", ["sliding_attention"]),
        ("is_causal", False),
        ("logit_scale", 0.5),
        ("quantization_config", {"bits": 4}),
        ("num_experts", 8),
        ("a_key_of_tomorrow", "x"),
    ],
)
def test_keys_that_may_change_the_computation_are_refused_by_name(
    write: Any, dialect: str, key: str, value: Any
) -> None:
    head = write(dialect)
    level = head.config["transformer_layer_config"] if dialect == "speculators" else head.config
    level[key] = value
    message = head.refusal()
    assert f"{key} = {value!r}" in message and "--assume ignore=" in message
    said = head.read(ignore=key).config.conventions["ignored config keys"]
    assert (said.value, said.source) == ([key], "flag")


@pytest.mark.parametrize(
    "config",
    [
        {"sliding_window": None, "use_sliding_window": False, "max_window_layers": 36},
        {"use_sliding_window": False, "sliding_window": 4096},
        {"layer_types": ["full_attention"] * 3, "sliding_window": 128},
        {"architectures": None, "model_type": "qwen2", "is_causal": True},
        {"tie_word_embeddings": True, "pretraining_tp": 1, "attention_dropout": 0.1},
        {"target_hidden_size": tiny.HIDDEN, "bias": False, "logit_scale": 1.0},
        {"torch_dtype": "bfloat16", "dtype": "float16", "transformers_version": "4.53.2"},
    ],
    ids=str,
)
def test_keys_that_change_nothing_are_passed_over(write: Any, config: dict[str, Any]) -> None:
    head = write("specforge")
    head.config |= config
    head.read()


def test_what_the_speculators_library_writes_beside_it_is_passed_over(write: Any) -> None:
    head = write("speculators")
    head.config |= {
        "auto_map": {"": "eagle3.Eagle3SpeculatorConfig"},
        "base_model": None,
        "enable_sp_ulysses": False,
        "has_no_defaults_at_init": False,
        "target_hidden_size": None,
        "torch_dtype": "bfloat16",
    }
    head.config["transformer_layer_config"] |= {
        "_attn_implementation_autoset": True,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "max_window_layers": 28,
        "pretraining_tp": 1,
        "rope_scaling": None,
        "sliding_window": None,
        "tie_word_embeddings": True,  # its verifier's
        "use_cache": True,
        "use_sliding_window": False,
    }
    assert head.read().config.conventions["lm_head"].value == "the head's own"


@pytest.mark.parametrize(
    ("key", "neutral", "other"),
    [
        ("use_aux_hidden_state", True, False),
        ("use_input_layernorm_in_first_layer", True, False),
        ("use_last_layernorm", True, False),
        ("use_mtp_layernorm", False, True),
        ("parallel_draft_step", None, 4),
    ],
)
def test_switches_of_other_exporters(write: Any, key: str, neutral: Any, other: Any) -> None:
    head = write("specforge")
    head.config["eagle_config"][key] = neutral
    head.read()
    head.config["eagle_config"][key] = other
    assert key in head.refusal()


def test_a_head_of_two_layers_is_refused(write: Any) -> None:
    head = write("speculators")
    head.config["transformer_layer_config"]["num_hidden_layers"] = 2
    assert "num_hidden_layers is 2" in head.refusal()


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 70) | st.floats() | st.sampled_from(["x", "silu"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("ab"), inner),
    max_leaves=4,
)


@pytest.mark.parametrize("dialect", NAMES)
def test_any_value_of_any_key_is_read_or_refused(write: Any, dialect: str) -> None:
    """No other exception may come out, so that no user sees a traceback."""
    head = write(dialect, embedding="copy", rope_scaling={"rope_type": "linear", "factor": 2.0})
    config = head.config
    config |= {"tie_word_embeddings": False, "architectures": [], "trained_by": None}
    read = head.read()
    paths = [(key,) for key in config]
    paths += [(k, i) for k, v in config.items() if isinstance(v, dict) for i in v]
    paths += [(k, i, j) for k, i in paths[len(config) :] if isinstance(config[k][i], dict)
              for j in config[k][i]]  # fmt: skip

    @settings(max_examples=60, deadline=None)
    @given(st.sampled_from(paths), _JSON)
    def check(path: tuple[str, ...], value: Any) -> None:
        raw = copy.deepcopy(config)
        level: Any = raw
        for key in path[:-1]:
            level = level[key]
        level[path[-1]] = value
        changed = replace(read, checkpoint=replace(read.checkpoint, raw=raw))
        with contextlib.suppress(CheckpointError):
            reread(changed)

    check()


# Another reading of the same head


def test_a_head_is_read_again_without_its_files(write: Any) -> None:
    head = write("specforge", norm_output=True).read(norm_output="true")
    for file in head.checkpoint.folder.iterdir():
        file.unlink()
    other = reread(head, aux_layer_ids=(0, 2, 5), assume={"norm_before_residual": "true"})
    assert other.config.aux_layer_ids == (0, 2, 5) and other.config.norm_before_residual
    assert other.config.norm_output, "what was said before still holds"
    assert all(other.weights[name] is tensor for name, tensor in head.weights.items())
    again = reread(other, assume={"norm_before_residual": "false"})
    assert again.config.aux_layer_ids == (0, 2, 5) and not again.config.norm_before_residual
    counted = reread(other, assume={"layer_ids": "inputs"})
    assert counted.config.aux_layer_ids == (0, 2, 5) and counted.aux_layer_ids is None
    assert reread(counted, aux_layer_ids=(1, 2, 3)).config.aux_layer_ids == (1, 2, 3)
    with pytest.raises(CheckpointError, match="cannot be read as absolute"):
        reread(head, assume={"d2t": "absolute"})
