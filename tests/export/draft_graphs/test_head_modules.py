"""Reading EAGLE-3 heads of the official layout, with the traps of other dialects."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from eagle3.export.draft_graphs.head_modules import build_head
from eagle3.export.heads.head_config import Head, TargetSizes
from eagle3.export.heads.reader import read_head
from eagle3.runtime.errors import CheckpointError

FACTS = TargetSizes(hidden_size=tiny.HIDDEN, vocab_size=64, num_layers=8)
LAYERS = "aux_layer_ids (hidden_states indices)"
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


class Checkpoint:
    """A head's folder that a test may damage before it is read."""

    def __init__(self, folder: Path, model: Any, **config: Any) -> None:
        tiny.save_head(folder, model, **config)
        self.folder = folder
        self.config: dict[str, Any] = json.loads((folder / "config.json").read_text())
        self.weights: dict[str, Tensor] = load_file(folder / "model.safetensors")

    def read(self, *, facts: TargetSizes = FACTS, layers: Any = None, **assume: str) -> Head:
        (self.folder / "config.json").write_text(json.dumps(self.config))
        save_file(self.weights, self.folder / "model.safetensors")
        return read_head(self.folder, facts, layers, assume)

    def refusal(self, **options: Any) -> str:
        with pytest.raises(CheckpointError) as caught:
            self.read(**options)
        return str(caught.value)


@pytest.fixture
def head(tmp_path: Path, llama: Any) -> Checkpoint:
    return Checkpoint(tmp_path / "head", llama, draft_vocab_size=40)


@pytest.fixture
def full_head(tmp_path: Path, llama: Any) -> Checkpoint:
    """Draft vocabulary = target vocabulary, no mapping: the dialect of Vicuna's head."""
    return Checkpoint(tmp_path / "full", llama)


# Fused layers


def test_the_default_layers_are_those_of_the_paper(head: Checkpoint) -> None:
    layers = head.read().config
    assert layers.aux_layer_ids == (2, 4, 5)
    assert layers.conventions[LAYERS].source == "dialect default"
    deep = TargetSizes(tiny.HIDDEN, 64, num_layers=32)
    assert head.read(facts=deep).config.aux_layer_ids == (2, 16, 29)


def test_layer_ids_of_this_dialect_count_outputs(head: Checkpoint) -> None:
    """Trap 4: [1, 3, 4] names what stands before layers 2, 4, 5."""
    head.config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [0, 2, 6]}
    config = head.read().config
    assert config.aux_layer_ids == (1, 3, 7)
    assert "plus one" in config.conventions[LAYERS].source


def test_a_flag_counts_hidden_states_and_wins(head: Checkpoint) -> None:
    head.config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [0, 2, 6]}
    config = head.read(layers=(0, 3, 6)).config
    assert config.aux_layer_ids == (0, 3, 6)
    assert config.conventions[LAYERS].source == "flag"


def test_layer_ids_of_unknown_counting_are_refused(head: Checkpoint) -> None:
    """The key at the top level is another dialect's, which counts the other way."""
    head.config["eagle_aux_hidden_state_layer_ids"] = [2, 4, 5]
    message = head.refusal()
    assert "--aux-layers" in message and "--assume layer_ids=" in message
    assert head.read(layers=(2, 4, 5)).config.aux_layer_ids == (2, 4, 5)
    config = head.read(layer_ids="inputs").config
    assert config.aux_layer_ids == (2, 4, 5)
    assert config.conventions[LAYERS].source == "flag (hidden_states indices)"
    assert head.read(layer_ids="outputs").config.aux_layer_ids == (3, 5, 6)
    head.config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [1, 3, 4]}
    assert "[2, 4, 5], and [1, 3, 4]" in head.refusal()


@pytest.mark.parametrize("num_layers", [1, 2, 3, 4, 5, 6])
def test_a_shallow_target_has_no_default_layers(head: Checkpoint, num_layers: int) -> None:
    """Trap 11: they coincide or are out of range."""
    facts = TargetSizes(tiny.HIDDEN, 64, num_layers)
    message = head.refusal(facts=facts)
    assert f"{num_layers} layers" in message and "--aux-layers" in message
    if num_layers >= 3:
        assert head.read(facts=facts, layers=(0, 1, 2)).config.aux_layer_ids == (0, 1, 2)


@pytest.mark.parametrize("layers", [(), (2, 4, 4), (5, 4, 2), (2, 4, 9), (-1, 2, 4)])
def test_layers_that_do_not_fit_are_refused(head: Checkpoint, layers: tuple[int, ...]) -> None:
    message = head.refusal(layers=layers)
    assert str(list(layers)) in message and "indices from 0 to 8" in message


@pytest.mark.parametrize("layers", [(8,), (2, 4), (1, 2, 4, 8)])
def test_fc_reads_as_many_layers_as_are_named(head: Checkpoint, layers: tuple[int, ...]) -> None:
    message = head.refusal(layers=layers)
    assert "fc.weight is [32, 96]" in message and f"[32, {32 * len(layers)}]" in message
    head.weights["fc.weight"] = torch.zeros(32, 32 * len(layers))
    assert head.read(layers=layers).config.aux_layer_ids == layers
    head.config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [i - 1 for i in layers]}
    assert head.read().config.aux_layer_ids == layers


@pytest.mark.parametrize("stored", ["2,4,5", [1, "3", 4], {"a": 1}])
def test_layer_ids_of_a_wrong_type(head: Checkpoint, stored: Any) -> None:
    head.config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": stored}
    assert "list of integers" in head.refusal()


# The vocabulary mapping


def test_offsets_become_the_targets_ids(head: Checkpoint) -> None:
    ids = head.read().target_ids
    assert ids.dtype == np.int64
    assert np.array_equal(ids, np.flatnonzero(head.weights["t2d"].numpy()))
    assert not np.array_equal(ids, head.weights["d2t"].numpy())


def test_absolute_ids_are_read_on_the_users_word_alone(head: Checkpoint) -> None:
    """Trap 6: some exporters store ids where offsets belong; t2d tells."""
    expected = head.read().target_ids
    assert head.read().config.conventions["d2t"].value == "offsets"
    offsets = head.weights["d2t"]
    head.weights["d2t"] = torch.from_numpy(expected.copy())
    assert "absolute ids" in (message := head.refusal()) and "--assume d2t=absolute" in message
    read = head.read(d2t="absolute")
    assert np.array_equal(read.target_ids, expected)
    assert read.config.conventions["d2t"].source == "flag"
    assert "cannot be read as offsets" in head.refusal(d2t="offsets")
    head.weights["d2t"] = offsets
    assert "cannot be read as absolute" in head.refusal(d2t="absolute")


def test_a_mapping_that_fits_both_readings_is_refused_without_t2d(head: Checkpoint) -> None:
    del head.weights["t2d"]
    head.weights["d2t"] = torch.arange(40) // 2  # the ids would have pairs: offsets alone fit
    assert np.array_equal(head.read().target_ids, np.arange(40) + np.arange(40) // 2)
    head.config["draft_vocab_size"] = 20
    head.weights["lm_head.weight"] = head.weights["lm_head.weight"][:20].contiguous()
    head.weights["d2t"] = torch.arange(20)
    assert "--assume d2t=offsets or --assume d2t=absolute" in head.refusal()
    assert np.array_equal(head.read(d2t="offsets").target_ids, 2 * np.arange(20))
    assert np.array_equal(head.read(d2t="absolute").target_ids, np.arange(20))


@pytest.mark.parametrize("fault", ["shifted", "unsorted", "beyond", "negative", "t2d", "twice"])
def test_a_mapping_that_fits_neither_reading_is_refused(head: Checkpoint, fault: str) -> None:
    d2t, t2d = head.weights["d2t"], head.weights["t2d"]
    if fault == "shifted":
        d2t += 1
    elif fault == "unsorted":
        d2t[0], d2t[1] = d2t[1] + 1, d2t[0] - 1
    elif fault == "beyond":
        d2t[-1] = 64
    elif fault == "negative":
        d2t[0] = -3
    elif fault == "twice":
        d2t[1] = d2t[0] - 1
    else:
        t2d[:] = ~t2d
    message = head.refusal()
    assert "d2t" in message and "neither" in message


def test_a_reduced_vocabulary_without_its_mapping_is_refused(head: Checkpoint) -> None:
    """Trap 5: never ids 0 .. Vd-1."""
    expected = head.read().target_ids
    del head.weights["t2d"]  # only says once more what d2t says
    assert np.array_equal(head.read().target_ids, expected)
    del head.weights["d2t"]
    assert "missing ['d2t']" in head.refusal()
    assert "missing ['d2t']" in head.refusal(d2t="offsets")


def test_a_full_vocabulary_needs_no_mapping(full_head: Checkpoint) -> None:
    assert np.array_equal(full_head.read().target_ids, np.arange(64))
    full_head.weights["d2t"] = torch.zeros(64, dtype=torch.int64)
    full_head.weights["t2d"] = torch.ones(64, dtype=torch.bool)
    assert np.array_equal(full_head.read().target_ids, np.arange(64))
    full_head.weights["d2t"] = torch.zeros(12, dtype=torch.int64)
    assert "d2t is [12], the config requires [64]" in full_head.refusal()


# RoPE


def test_a_missing_theta_is_the_dialects_and_is_recorded(head: Checkpoint) -> None:
    """Trap 7: the official training configuration has none."""
    del head.config["rope_theta"]
    config = head.read().config
    assert config.rope["rope_theta"] == 10000.0
    assert config.conventions["rope"].source == "dialect default (rope_theta)"
    config = head.read(rope_theta="1e6").config
    assert config.rope["rope_theta"] == 1e6
    assert config.conventions["rope"].source == "flag (rope_theta)"


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_nested_rope_is_used(head: Checkpoint, key: str) -> None:
    head.config["rope_theta"] = 5000.0
    head.config[key] = LLAMA3
    config = head.read().config
    assert dict(config.rope) == {**LLAMA3, "rope_theta": 5000.0}
    assert config.conventions["rope"].source == "config"
    head.config[key] = {**LLAMA3, "rope_theta": 700.0}
    assert head.read().config.rope["rope_theta"] == 700.0
    head.config[key] = {"type": "linear", "factor": 2.0}  # the older name of the key
    assert head.read().config.rope["rope_type"] == "linear"


@pytest.mark.parametrize(
    ("rope", "named"),
    [
        ({"rope_type": "dynamic", "factor": 2.0}, "dynamic"),
        ({"rope_type": "longrope"}, "longrope"),
        ({"rope_type": "spiral"}, "spiral"),
        ({"rope_type": "llama3", "factor": 8.0}, "low_freq_factor"),
        ({"rope_type": "linear"}, "factor"),
        ({"rope_type": "yarn", "factor": 2.0}, "original_max_position_embeddings"),
        ({"rope_type": "default", "mrope_section": [2, 1, 1]}, "mrope_section"),
        ({"full_attention": {"rope_theta": 5.0}, "sliding_attention": {}}, "full_attention"),
        ({"rope_type": "default", "factor": 2.0}, "'default' has factor"),
        ({"rope_type": "default", "partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ("llama3", "rope_scaling"),
    ],
)
def test_a_rope_that_is_not_understood_is_refused(head: Checkpoint, rope: Any, named: str) -> None:
    head.config["rope_scaling"] = rope
    assert named in head.refusal()


@pytest.mark.parametrize("value", ["abc", [1], 0, -5, math.inf, math.nan, True, 10**400])
@pytest.mark.parametrize("key", ["rope_theta", "rms_norm_eps"])
def test_numbers_out_of_range_are_named(head: Checkpoint, key: str, value: Any) -> None:
    """A theta of 0 is not the default's."""
    head.config[key] = value
    message = head.refusal()
    assert f"has {key} {value!r:.80}; a number above 0" in message


@pytest.mark.parametrize(
    ("rope", "named"),
    [
        ({"rope_type": ["x"]}, "rope_type is ['x']; supported are default"),
        ({"type": 3}, "rope_type is 3"),
        ({"rope_type": "linear", "factor": "x"}, "factor 'x'"),
        ({"rope_type": "linear", "factor": 0}, "factor 0"),
        ({"rope_type": "yarn", "factor": -2}, "factor -2"),
        ({"rope_type": "yarn", "factor": 2, "beta_fast": "x"}, "beta_fast 'x'"),
        ({**LLAMA3, "low_freq_factor": [1]}, "low_freq_factor [1]"),
        ({"rope_type": "default", "rope_theta": 0}, "rope_theta 0"),
        ([], "rope_scaling is [], not an object"),
    ],
)
def test_rope_values_out_of_range_are_named(head: Checkpoint, rope: Any, named: str) -> None:
    head.config["rope_scaling"] = rope
    assert named in head.refusal()


def test_a_theta_that_is_null_counts_as_missing(head: Checkpoint) -> None:
    head.config |= {"rope_theta": 700, "rope_parameters": {"rope_theta": None}}
    config = head.read().config
    assert config.rope["rope_theta"] == 700.0 and config.conventions["rope"].source == "config"
    head.config["rope_theta"] = None
    config = head.read().config
    assert config.rope["rope_theta"] == 10000.0
    assert config.conventions["rope"].source == "dialect default (rope_theta)"


def test_two_ropes_that_differ_are_refused(head: Checkpoint) -> None:
    head.config |= {"rope_scaling": LLAMA3, "rope_parameters": {**LLAMA3, "factor": 4.0}}
    assert "rope_parameters" in (message := head.refusal()) and "differ" in message
    head.config["rope_parameters"] = LLAMA3
    assert head.read().config.rope["factor"] == 8.0


# Tensors


def test_missing_unexpected_and_misshapen_tensors_are_named(head: Checkpoint) -> None:
    q_proj = head.weights.pop("midlayer.self_attn.q_proj.weight")
    head.weights["midlayer.self_attn.v_norm.weight"] = torch.ones(8)
    message = head.refusal()
    assert "missing ['midlayer.self_attn.q_proj.weight']" in message
    assert "unexpected ['midlayer.self_attn.v_norm.weight']" in message
    del head.weights["midlayer.self_attn.v_norm.weight"]
    head.weights["midlayer.self_attn.q_proj.weight"] = q_proj[:, : tiny.HIDDEN].contiguous()
    message = head.refusal()
    assert "midlayer.self_attn.q_proj.weight is [32, 32]" in message and "[32, 64]" in message


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_weights_that_are_no_numbers_are_refused(head: Checkpoint, value: float) -> None:
    head.weights["midlayer.mlp.up_proj.weight"][3, 4] = value
    assert "midlayer.mlp.up_proj.weight" in head.refusal()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool])
def test_d2t_is_of_integers(head: Checkpoint, dtype: torch.dtype) -> None:
    head.weights["d2t"] = head.weights["d2t"].to(dtype)
    assert f"d2t is {dtype}; it must be of an integer dtype" in head.refusal()
    ids = head.weights["t2d"].nonzero().flatten()
    head.weights["d2t"] = (ids - torch.arange(40)).to(torch.int32)
    assert np.array_equal(head.read().target_ids, ids.numpy())


@pytest.mark.parametrize("dtype", [torch.int8, torch.complex64])
@pytest.mark.parametrize("name", ["fc.weight", "embed_tokens.weight"])
def test_weights_are_floating_point(head: Checkpoint, name: str, dtype: torch.dtype) -> None:
    head.weights["embed_tokens.weight"] = torch.zeros(64, tiny.HIDDEN)
    head.weights[name] = head.weights[name].to(dtype)
    assert f"{name} is {dtype}; weights must be floating point" in head.refusal()


def test_biases_are_read_where_the_config_says_so(head: Checkpoint) -> None:
    head.config["attention_bias"] = True
    assert "midlayer.self_attn.k_proj.bias" in head.refusal()
    for name, width in {"q": 32, "k": 16, "v": 16, "o": 32}.items():
        head.weights[f"midlayer.self_attn.{name}_proj.bias"] = torch.ones(width)
    assert build_head(head.read(), torch.float32).midlayer.self_attn.k_proj.bias is not None
    head.config["attention_bias"] = False
    assert "unexpected" in head.refusal()


def test_a_head_for_another_target_is_refused_with_both_numbers(head: Checkpoint) -> None:
    message = head.refusal(facts=TargetSizes(48, 64, 8))
    assert "32" in message and "48" in message
    message = head.refusal(facts=TargetSizes(tiny.HIDDEN, 96, 8))
    assert "64" in message and "96" in message


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_size", None),
        ("hidden_size", "32"),
        ("intermediate_size", 0),
        ("num_attention_heads", True),
        ("num_attention_heads", 5),
        ("num_key_value_heads", 3),
        ("draft_vocab_size", -1),
        ("vocab_size", 2.5),
        ("eagle_config", [1]),
        ("hidden_act", "no-such"),
        ("attention_bias", "false"),
        ("mlp_bias", 0),
        ("norm_output", "post"),
    ],
)
def test_a_config_that_makes_no_sense(head: Checkpoint, key: str, value: Any) -> None:
    head.config[key] = value
    with pytest.raises(CheckpointError, match=key):
        build_head(head.read(), torch.float32)
