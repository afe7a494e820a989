"""Test the output and the exit status of the commands `eagle3 plan ...`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from safetensors.torch import save_file
from torch import zeros

from eagle3 import cli
from eagle3.plans.plan import Plan
from eagle3.plans.preset import load_preset
from eagle3.runtime.bundle.folder import Bundle


def call(*words: str | Path) -> Result:
    return CliRunner().invoke(cli.main, [str(word) for word in words])


def refused(result: Result, *parts: str) -> None:
    assert result.exit_code == 1, result.output
    assert "Traceback" not in result.output and result.stdout == ""
    assert all(part in result.stderr for part in parts), result.stderr


@pytest.fixture(scope="module")
def llama_8b(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with only the configuration of Llama-3.1-8B: there are no weights to read."""
    folder = tmp_path_factory.mktemp("hub") / "Llama-3.1-8B"
    folder.mkdir()
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_the_group_is_instant() -> None:
    """Check the imports instead of the time, so that a busy machine cannot fail the test."""
    code = (
        "import sys; from eagle3.cli import main\n"
        "try: main(['plan', 'check', '--help'])\n"
        "except SystemExit as end: assert end.code == 0\n"
        "heavy = {'numpy', 'onnxruntime', 'torch', 'transformers', 'tomllib'}\n"
        "print('heavy', heavy & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Usage" in done.stdout and "heavy set()" in done.stdout


def test_list_names_every_preset() -> None:
    lines = call("plan", "list").stdout.splitlines()
    assert [line.split()[0] for line in lines][:2] == ["cpu", "h100"]
    assert "NVIDIA L4: 24 GB, 300 GB/s; tensorrt in float16, up to 63 draft tokens" in lines[-2]
    data = json.loads(call("plan", "list", "--json").stdout)
    assert data["l4"]["device"]["memory_bytes"] == 24_000_000_000


def test_show_prints_the_file_with_its_reasons(tmp_path: Path) -> None:
    text = call("plan", "show", "rtx-4090").stdout
    assert text == load_preset("rtx-4090").text
    (tmp_path / "again.toml").write_text(text)  # the printed text is a plan file
    again = load_preset(str(tmp_path / "again.toml"))
    assert again.plan == load_preset("rtx-4090").plan
    data = json.loads(call("plan", "show", "rtx-4090", "--json").stdout)
    assert Plan.from_json(data["plan"]) == again.plan
    refused(call("plan", "show", "rtx-4091"), "preset 'rtx-4091' not found: use one of cpu")


def test_check_reckons_a_checkpoint_without_weights(llama_8b: Path) -> None:
    done = call("plan", "check", llama_8b, "--plan", "l4", "--json")
    assert done.exit_code == 0, done.output
    data = json.loads(done.stdout)
    assert data["target"]["num_parameters"] == 8_030_261_248
    assert data["memory"]["target_weights"] == 2 * 8_030_261_248
    assert data["memory"]["target_kv"] == 4097 * 131072
    assert data["memory"]["total"] < data["device"]["usable_bytes"] == 22_500_000_000
    plain = data["calls"]["1"]
    assert plain["ms"] == pytest.approx(1e3 * plain["num_bytes"] / 300e9)
    assert plain["bound"] == "memory"
    assert data["round"] is None and data["unbuilt"] == []


def test_check_refuses_what_does_not_fit(llama_8b: Path) -> None:
    result = call("plan", "check", llama_8b, "--plan", "jetson-orin-nano")
    refused(result, "needs 16.", "has 6.00 GB (8.00 GB less 2.00 GB", "neither a shorter context")
    result = call("plan", "check", llama_8b, "--plan", "l4", "--max-seq-len", "131072")
    refused(result, "needs 33.", "NVIDIA L4 has 22.50 GB", "max_seq_len ", " or less would fit")


def test_check_says_what_a_draft_is_worth(llama_8b: Path, tmp_path: Path) -> None:
    draft = write_head(tmp_path / "head", d=4096, wide=14336, vocab=32000, heads=32, kv_heads=8)
    words = ("plan", "check", llama_8b, "--draft", draft, "--plan", "h100")
    done = call(*words, "--tau", "2.5,5.4")
    assert done.exit_code == 0, done.output
    rows = {line.split()[0]: line for line in done.stdout.splitlines()}
    assert "424.67M parameters, draft vocabulary 32000" in rows["draft"]
    assert "the draft's copy of target weights 1.05 GB" in rows["weights"]
    assert "7 calls" in rows["drafting"] and "verifying 64 rows" in rows["round"]
    assert "2.5: " in rows["speedup"] and "5.4: " in rows["speedup"]
    data = json.loads(call(*words, "--json").stdout)
    cost = data["round"]
    assert list(cost["speedup"]) == [str(n) for n in range(1, 9)]  # a tree of 7 levels
    assert cost["ms"] == pytest.approx(cost["draft_ms"] + data["calls"]["64"]["ms"])
    assert cost["speedup"]["5"] == pytest.approx(5 * data["calls"]["1"]["ms"] / cost["ms"])
    refused(call(*words, "--tau", "9"), "tau must be from 1 to 8", "a tree of 7 levels, got 9")
    assert call(*words, "--tau", "many").exit_code == 2


def write_head(folder: Path, *, d: int, wide: int, vocab: int, heads: int, kv_heads: int) -> Path:
    """Write an EAGLE-3 head with these shapes, whose weights take no disk space."""
    kv = d // heads * kv_heads
    shapes = {
        "fc.weight": (d, 3 * d),
        "midlayer.self_attn.q_proj.weight": (d, 2 * d),
        "midlayer.self_attn.k_proj.weight": (kv, 2 * d),
        "midlayer.self_attn.v_proj.weight": (kv, 2 * d),
        "midlayer.self_attn.o_proj.weight": (d, d),
        "midlayer.mlp.gate_proj.weight": (wide, d),
        "midlayer.mlp.up_proj.weight": (wide, d),
        "midlayer.mlp.down_proj.weight": (d, wide),
        "lm_head.weight": (vocab, d),
        "norm.weight": (d,),
    }
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"num_attention_heads": heads}))
    write_sparse_safetensors(folder / "model.safetensors", shapes)
    return folder


def write_sparse_safetensors(path: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    """Write a complete header and a sparse file of the right length, since no value is read."""
    header, offset = {}, 0
    for name, shape in shapes.items():
        size = 2 * shape[0] * (shape[1] if len(shape) == 2 else 1)
        header[name] = {"dtype": "F16", "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + offset)


def test_check_refuses_another_targets_head(llama_8b: Path, tmp_path: Path) -> None:
    draft = write_head(tmp_path / "head", d=64, wide=64, vocab=40, heads=4, kv_heads=2)
    result = call("plan", "check", llama_8b, "--draft", draft, "--plan", "h100")
    refused(result, "fc.weight is [64, 192]", "hidden size 4096", "head for another target")


def test_check_refuses_a_head_that_is_none(llama_8b: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    refused(
        call("plan", "check", llama_8b, "--draft", tmp_path, "--plan", "h100"), "no .safetensors"
    )
    save_file({"lm_head.weight": zeros(4, 4)}, tmp_path / "model.safetensors")
    refused(
        call("plan", "check", llama_8b, "--draft", tmp_path, "--plan", "h100"),
        "no tensor fc.weight; is it an EAGLE head?",
    )


def test_check_of_a_plan_that_nothing_builds_yet_says_so(llama_8b: Path) -> None:
    done = call("plan", "check", llama_8b, "--plan", "h100", "--batch", "8", "--json")
    assert done.exit_code == 0
    assert "warning: this plan cannot be built yet: batch is 8" in done.stderr
    data = json.loads(done.stdout)
    assert data["memory"]["target_kv"] == 8 * 8193 * 131072
    assert data["plan"]["batch"] == 8 and "batch is 8" in data["unbuilt"][0]


def test_check_reads_a_plan_file(llama_8b: Path, tmp_path: Path) -> None:
    text = (
        'device = "h100"\n[plan]\nbackend = "ort-cuda"\nlowering = "portable"\n'
        'dtype = "float16"\nmax_seq_len = 999999\n'
    )
    (tmp_path / "own.toml").write_text(text)
    result = call("plan", "check", llama_8b, "--plan", tmp_path / "own.toml")
    refused(result, "max_seq_len is 999999", "supports only 131072 positions")
    (tmp_path / "own.toml").write_text(text.replace("max_seq_len", "max_len"))
    result = call("plan", "check", llama_8b, "--plan", tmp_path / "own.toml")
    refused(result, "own.toml: plan has the unknown keys max_len")


def test_check_of_what_is_not_there() -> None:
    refused(call("plan", "check", "./nothing", "--plan", "cpu"), "no such folder or file")
    assert call("plan", "check", "./nothing").exit_code == 2


def test_check_of_a_bundle_needs_no_torch(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers.utils", None)
    words = ("plan", "check", bundle.root, "--plan", "cpu")
    done = call(*words, "--max-seq-len", "256", "--json")
    assert done.exit_code == 0, done.output
    data = json.loads(done.stdout)
    parameters = data["target"]["num_parameters"]
    assert parameters < data["memory"]["target_weights"] < 2 * parameters  # int8, and scales
    assert data["draft"]["draft_vocab_size"] == 40
    assert "note: the bundle was exported with max_seq_len 128, the plan has 256" in done.stderr
    refused(call(*words), "max_seq_len is 2048", "only 512 positions: use --max-seq-len 512")
    refused(call(*words, "--draft", "x"), "leave --draft out")
