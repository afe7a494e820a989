"""Reading EAGLE-3 heads of the official layout, with the traps of other dialects."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from eagle3.export.heads import Head, TargetFacts, read_head
from eagle3.export.head_graph import build_head
from eagle3.runtime.errors import CheckpointError

FACTS = TargetFacts(hidden_size=tiny.HIDDEN, vocab_size=64, num_layers=8)
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

    def read(self, *, facts: TargetFacts = FACTS, layers: Any = None) -> Head:
        (self.folder / "config.json").write_text(json.dumps(self.config))
        save_file(self.weights, self.folder / "model.safetensors")
        return read_head(self.folder, facts, layers)

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
    deep = TargetFacts(tiny.HIDDEN, 64, num_layers=32)
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
    assert "--aux-layers" in head.refusal()
    assert head.read(layers=(2, 4, 5)).config.aux_layer_ids == (2, 4, 5)


@pytest.mark.parametrize("num_layers", [1, 2, 3, 4, 5, 6])
def test_a_shallow_target_has_no_default_layers(head: Checkpoint, num_layers: int) -> None:
    """Trap 11: they coincide or are out of range."""
    facts = TargetFacts(tiny.HIDDEN, 64, num_layers)
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


def test_absolute_ids_are_recognised(head: Checkpoint) -> None:
    """Trap 6: some exporters store ids where offsets belong; t2d tells."""
    expected = head.read().target_ids
    head.weights["d2t"] = torch.from_numpy(expected.copy())
    assert np.array_equal(head.read().target_ids, expected)


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
    for name in ("d2t", "t2d"):
        kept = head.weights.pop(name)
        assert f"missing ['{name}']" in head.refusal()
        head.weights[name] = kept


def test_a_full_vocabulary_needs_no_mapping(full_head: Checkpoint) -> None:
    assert np.array_equal(full_head.read().target_ids, np.arange(64))
    full_head.weights["d2t"] = torch.zeros(64, dtype=torch.int64)
    full_head.weights["t2d"] = torch.ones(64, dtype=torch.bool)
    assert np.array_equal(full_head.read().target_ids, np.arange(64))
    full_head.weights["d2t"] = torch.zeros(12, dtype=torch.int64)
    assert "d2t is [12], the config asks for [64]" in full_head.refusal()


# RoPE


def test_a_missing_theta_is_the_dialects_and_is_recorded(head: Checkpoint) -> None:
    """Trap 7: the official training configuration has none."""
    del head.config["rope_theta"]
    config = head.read().config
    assert config.rope["rope_theta"] == 10000.0
    assert config.conventions["rope"].source == "dialect default"


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
    assert config.conventions["rope"].source == "dialect default"


# Tensors


def test_missing_unexpected_and_misshapen_tensors_are_named(head: Checkpoint) -> None:
    q_proj = head.weights.pop("midlayer.self_attn.q_proj.weight")
    head.weights["midlayer.self_attn.q_norm.weight"] = torch.ones(8)
    message = head.refusal()
    assert "missing ['midlayer.self_attn.q_proj.weight']" in message
    assert "unexpected ['midlayer.self_attn.q_norm.weight']" in message
    del head.weights["midlayer.self_attn.q_norm.weight"]
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
    head.weights["d2t"] = head.weights["t2d"].nonzero().flatten().to(torch.int32)
    assert np.array_equal(head.read().target_ids, head.weights["d2t"].numpy())


@pytest.mark.parametrize("dtype", [torch.int8, torch.complex64])
@pytest.mark.parametrize("name", ["fc.weight", "embed_tokens.weight"])
def test_weights_are_floating_point(head: Checkpoint, name: str, dtype: torch.dtype) -> None:
    head.weights["embed_tokens.weight"] = torch.zeros(64, tiny.HIDDEN)
    head.weights[name] = head.weights[name].to(dtype)
    assert f"{name} is {dtype}; weights must be floating point" in head.refusal()


def test_the_heads_own_embedding_is_not_used_and_that_is_recorded(head: Checkpoint) -> None:
    """Trap 9: some heads carry a random one."""
    head.weights["embed_tokens.weight"] = torch.randn(64, tiny.HIDDEN)
    assert "target's" in head.read().config.conventions["embedding"].value
    head.weights["embed_tokens.weight"] = torch.randn(60, tiny.HIDDEN)
    assert "embed_tokens.weight is [60, 32]" in head.refusal()


def test_biases_are_read_where_the_config_says_so(head: Checkpoint) -> None:
    head.config["attention_bias"] = True
    assert "midlayer.self_attn.k_proj.bias" in head.refusal()
    for name, width in {"q": 32, "k": 16, "v": 16, "o": 32}.items():
        head.weights[f"midlayer.self_attn.{name}_proj.bias"] = torch.ones(width)
    assert build_head(head.read(), torch.float32).midlayer.self_attn.k_proj.bias is not None
    head.config["attention_bias"] = False
    assert "unexpected" in head.refusal()


def test_a_head_for_another_target_is_refused_with_both_numbers(head: Checkpoint) -> None:
    message = head.refusal(facts=TargetFacts(48, 64, 8))
    assert "32" in message and "48" in message
    message = head.refusal(facts=TargetFacts(tiny.HIDDEN, 96, 8))
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


# Dialects


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("norm_before_residual", True),
        ("norm_before_fc", True),
        ("fc_norm", True),
        ("speculators_model_type", "eagle3"),
        ("transformer_layer_config", {"hidden_size": 32}),
        ("sliding_window", 4096),
        ("target_hidden_size", 48),
    ],
)
def test_keys_that_change_the_computation_are_refused(
    head: Checkpoint, key: str, value: Any
) -> None:
    """Traps 1, 2, 3, 8."""
    head.config[key] = value
    assert key in head.refusal()


@pytest.mark.parametrize(
    "config",
    [
        {"norm_before_residual": False, "sliding_window": None},
        {"target_hidden_size": tiny.HIDDEN},
        {"use_sliding_window": False, "sliding_window": 4096},
        {"tie_word_embeddings": True},
    ],
)
def test_keys_that_change_nothing_are_accepted(head: Checkpoint, config: dict[str, Any]) -> None:
    head.config |= config
    head.read()


def test_a_normed_output_is_read(head: Checkpoint) -> None:
    """Trap 3: what is fed back in EAGLE-3.1."""
    assert not head.read().config.norm_output
    assert head.read().config.conventions["norm_output"].source == "dialect default"
    head.config["norm_output"] = True
    config = head.read().config
    assert config.norm_output and build_head(head.read(), torch.float32).norm_output
    assert config.conventions["norm_output"].value is True
    assert config.conventions["norm_output"].source == "config"


def test_a_speculators_head_is_refused_with_the_reason(head: Checkpoint) -> None:
    head.weights = {name.replace("midlayer", "layers.0"): t for name, t in head.weights.items()}
    assert "no tensor is named midlayer" in head.refusal()
    head.config |= {"speculators_model_type": "eagle3", "transformer_layer_config": {"a": 1}}
    assert "speculators_model_type" in head.refusal()


# Files


def as_bin(head: Checkpoint, payload: Any, name: str = "pytorch_model.bin") -> None:
    (head.folder / "model.safetensors").unlink(missing_ok=True)
    torch.save(payload, head.folder / name)


def test_a_plain_bin_file(head: Checkpoint) -> None:
    expected = head.read()
    as_bin(head, head.weights)
    as_bin(head, {"step": 3}, "training_args.bin")  # what trainers leave beside it
    got = read_head(head.folder, FACTS)
    assert all(torch.equal(got.weights[n], t) for n, t in expected.weights.items())


class Payload:
    """Creates a file when it is unpickled by a loader that runs what it reads."""

    def __init__(self, victim: Path) -> None:
        self._victim = victim

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self._victim),)


def test_code_in_a_bin_file_is_refused_and_never_runs(head: Checkpoint, tmp_path: Path) -> None:
    """Trap 12."""
    victim = tmp_path / "was-run"
    as_bin(head, {**head.weights, "fc.weight": Payload(victim)})
    with pytest.raises(CheckpointError, match="more than tensors"):
        read_head(head.folder, FACTS)
    assert not victim.exists()
    torch.load(head.folder / "pytorch_model.bin", weights_only=False)
    assert victim.exists(), "the payload would have worked"


@pytest.mark.parametrize("payload", [[torch.ones(3)], {"state_dict": {"a": torch.ones(3)}}, 5])
def test_a_bin_file_of_something_else(head: Checkpoint, payload: Any) -> None:
    as_bin(head, payload)
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin"):
        read_head(head.folder, FACTS)


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("config.json", None),
        ("config.json", "{"),
        ("config.json", "[1]"),
        ("config.json", "[" * 100_000),
        ("config.json", '{"a":' * 100_000),
        ("model.safetensors", None),
        ("model.safetensors", "short"),
    ],
)
def test_missing_and_damaged_files_are_named(
    head: Checkpoint, file: str, content: str | None
) -> None:
    if content is None:
        (head.folder / file).unlink()
    else:
        (head.folder / file).write_text(content)
    with pytest.raises(CheckpointError) as caught:
        read_head(head.folder, FACTS)
    assert str(head.folder) in str(caught.value)


def test_no_such_head(tmp_path: Path) -> None:
    for source in (tmp_path / "nowhere", "./nowhere", "nowhere", "a/b/c"):
        with pytest.raises(CheckpointError, match="no such folder"):
            read_head(source, FACTS)
