"""Targets that must load and export, and what is refused by name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import onnx
import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file
from transformers import T5Config, T5ForConditionalGeneration

import eagle3
from eagle3.export.exporter import ExportRequest, export_bundle
from eagle3.export.targets.target import load_target
from eagle3.runtime.bundle.folder import Bundle
from eagle3.runtime.errors import ExportError, RequestError, UnsupportedModel

TOLERANCE = 1e-4

# Checkpoints that load


def export(folder: Path, output: Path, **options: Any) -> Bundle:
    return tiny.export_tiny(folder, None, output, **options)


def tiny_llama(**overrides: Any) -> Any:
    return tiny.tiny_model("llama", num_layers=2, scale=2.0, **overrides)


def model_bytes(parameters: Iterable[torch.Tensor]) -> int:
    return sum(p.numel() * p.element_size() for p in parameters)


def test_tied_embeddings_are_stored_once(exported: Any) -> None:
    """Case 21: Gemma-3 reads one matrix as embedding and as lm_head."""
    for lowering in ("ort", "portable"):
        target = exported("gemma3_text", lowering)
        assert target.model.config.tie_word_embeddings
        data = target.bundle.path("target.onnx.data").stat().st_size
        vectors = sum(4 * p.numel() for p in target.model.parameters() if p.dim() == 1)
        # Vectors this short stay in the .onnx, a constant may come along; a copy of the embedding,
        # also a transposed one, would be 8 KiB. parameters() counts a tied matrix once.
        copy = model_bytes([target.model.lm_head.weight])
        assert 0 <= data - (model_bytes(target.model.parameters()) - vectors) < copy / 4
        # A Transpose of a weight would be folded, and be a copy, when ONNX Runtime loads it.
        graph = onnx.load(target.bundle.path("target.onnx"), load_external_data=False).graph
        turned = {node.input[0] for node in graph.node if node.op_type == "Transpose"}
        assert not turned & {tensor.name for tensor in graph.initializer}
        assert sum(node.op_type == "Gemm" for node in graph.node) == 1


def test_sharded_safetensors(tmp_path: Path) -> None:
    """Case 21. The self-check of the export compares with what transformers loads."""
    model = tiny_llama(vocab_size=256)
    folder = tiny.save_target(tmp_path / "sharded", model, max_shard_size="40KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    loaded = load_target(str(folder), "float32").model
    for (name, mine), theirs in zip(loaded.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(mine, theirs), name


def test_a_bin_only_target(llama_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "bin"
    shutil.copytree(llama_folder, folder)
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(weights, folder / "pytorch_model.bin")
    model = load_target(str(folder), "float32").model
    assert torch.equal(model.lm_head.weight, weights["lm_head.weight"])


def test_a_bfloat16_checkpoint_becomes_float32_engines(tmp_path: Path) -> None:
    model, tokenizer = tiny_llama(), tiny.tiny_tokenizer(64, chat_template=None)
    assert tokenizer.add_tokens(["<beyond>"], special_tokens=True) == 1
    folder = tiny.save_target(tmp_path / "bf16", model.to(torch.bfloat16), tokenizer)
    assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"
    # Also: no chat template, a list of EOS ids, tokens that the embedding has no rows for.
    (folder / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [1, 7, 64], "do_sample": True, "temperature": 0.6})
    )
    bundle = export(folder, tmp_path / "out")
    assert {s.dtype for s in bundle.manifest.engines["target"].outputs} == {"float32", "int64"}
    assert bundle.manifest.self_check["relative_errors"]["logits"] < TOLERANCE
    # Case 23.
    assert bundle.manifest.tokenizer.chat_template is None
    assert bundle.manifest.generation.eos_token_ids == (1, 7)
    assert bundle.manifest.generation.temperature == 0.6
    engine = eagle3.load(bundle.root, threads=1)
    assert engine.encode("t5 t6", chat=False) == [5, 6]
    with pytest.raises(RequestError, match="64"):
        engine.encode("t5 <beyond>", chat=False)


def test_float16_engines_run_on_the_cpu_within_their_tolerance(
    exported: Any, tmp_path: Path
) -> None:
    folder = exported("qwen2", "ort").folder
    bundle = export(folder, tmp_path / "out", plan=tiny.tiny_plan(dtype="float16"))
    check = bundle.manifest.self_check
    assert check["tolerance"] == 2e-2
    assert 1e-5 < max(check["relative_errors"].values()) < 2e-2
    outputs = {s.name: s.dtype for s in bundle.manifest.engines["target"].outputs}
    assert outputs["logits"] == "float32" and outputs["present_k.0"] == "float16"
    engine = eagle3.load(bundle.root, threads=1)
    assert len(engine.generate([5, 6], max_new_tokens=4, logit_bias={1: -100.0}).token_ids) == 4


def test_bfloat16_is_exported_unchecked_and_says_so(exported: Any, tmp_path: Path) -> None:
    said: list[str] = []
    request = ExportRequest(
        target=str(exported("qwen2", "ort").folder),
        drafts=(),
        output=tmp_path / "out",
        plan=tiny.tiny_plan(dtype="bfloat16", lowering="portable", backend="ort-cuda"),
        force=True,
    )
    shutil.copytree(exported("qwen2", "ort").bundle.root, request.output)  # to be replaced
    bundle, check = export_bundle(request, said.append)
    assert "bfloat16" in check.engines["skipped"]
    assert bundle.manifest.self_check == check.engines
    assert any("not compared with PyTorch" in line for line in said)
    outputs = {s.name: s.dtype for s in bundle.manifest.engines["target"].outputs}
    assert outputs["logits"] == "float32" and outputs["present_v.1"] == "bfloat16"
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


# What is refused


def refusal(folder: Path | str, kind: type[ExportError] = ExportError) -> str:
    """The message; no other exception may come out, so that no user sees a traceback."""
    with pytest.raises(kind) as caught:
        load_target(str(folder), "float32")
    return str(caught.value)


def test_what_is_no_model_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "no such folder" in refusal(tmp_path / "nowhere")
    assert "no such folder" in refusal("./nowhere")
    (tmp_path / "empty").mkdir()
    assert "no config.json" in refusal(tmp_path / "empty")
    assert "no such GGUF file" in refusal(tmp_path / "x.gguf")
    (tmp_path / "broken.gguf").write_bytes(b"GGUF but not really")
    assert "broken.gguf" in refusal(tmp_path / "broken.gguf")
    (tmp_path / "file").write_text("text")
    assert "file" in refusal(tmp_path / "file")


def test_a_hub_id_that_cannot_be_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*_: Any, **__: Any) -> Any:
        raise OSError("We couldn't connect to the hub")

    monkeypatch.setattr("eagle3.export.targets.target.AutoTokenizer.from_pretrained", unreachable)
    message = refusal("someone/some-model")
    assert "someone/some-model" in message and "could not be fetched" in message


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("config.json", "{"),
        ("config.json", '{"model_type": "no-such-architecture"}'),
        ("config.json", '{"model_type": "llama", "hidden_size": "wide"}'),
        ("model.safetensors", "not tensors"),
        ("model.safetensors", None),
        ("tokenizer.json", "{}"),
        ("tokenizer.json", "{"),
    ],
)
def test_a_damaged_folder(
    llama_folder: Path, tmp_path: Path, file: str, content: str | None
) -> None:
    folder = tmp_path / "damaged"
    shutil.copytree(llama_folder, folder)
    if content is None:
        (folder / file).unlink()
    else:
        (folder / file).write_text(content)
    assert str(folder) in refusal(folder)


@pytest.mark.parametrize("fault", ["missing", "unexpected", "mismatched"])
def test_weights_that_are_not_the_configs(llama_folder: Path, tmp_path: Path, fault: str) -> None:
    """transformers would fill them with random numbers, against which no self-check helps."""
    folder, name = tmp_path / "target", "model.layers.1.mlp.up_proj.weight"
    shutil.copytree(llama_folder, folder)
    weights = load_file(folder / "model.safetensors")
    if fault == "missing":
        del weights[name]
    elif fault == "unexpected":
        name = "model.layers.1.self_attn.q_proj.bias"
        weights[name] = torch.ones(tiny.HIDDEN)
    else:
        weights[name] = weights[name][:5].contiguous()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    assert name in refusal(folder)


def test_encoder_decoder_is_refused_by_name(tmp_path: Path) -> None:
    config = T5Config(
        vocab_size=64,
        d_model=32,
        d_kv=8,
        d_ff=32,
        num_layers=1,
        num_heads=4,
        decoder_start_token_id=0,
    )
    folder = tiny.save_target(tmp_path / "t5", T5ForConditionalGeneration(config))
    message = refusal(folder, UnsupportedModel)
    assert "T5ForConditionalGeneration" in message and "encoder-decoder" in message


@pytest.mark.parametrize(
    ("architecture", "options", "named"),
    [
        ("mamba", {"state_size": 4}, "MambaForCausalLM"),
        ("bloom", {}, "BloomForCausalLM"),
        ("falcon", {}, "FalconForCausalLM"),
        ("gemma4_text", {}, "Gemma4ForCausalLM: its layers need caches of different shapes"),
    ],
)
def test_an_architecture_that_cannot_be_expressed_is_refused_by_name(
    tmp_path: Path, architecture: str, options: dict[str, Any], named: str
) -> None:
    model = tiny.tiny_model(architecture, num_layers=2, **options)
    folder = tiny.save_target(tmp_path / architecture, model)
    assert named in refusal(folder, UnsupportedModel)


def test_an_argument_of_attention_that_is_not_known_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ignoring it would change the output in silence."""
    model = tiny_llama()
    attend = type(model.model.layers[0].self_attn).forward
    monkeypatch.setattr(
        type(model.model.layers[0].self_attn),
        "forward",
        lambda self, *args, **kwargs: attend(self, *args, **kwargs, new_bias=1.0),
    )
    folder = tiny.save_target(tmp_path / "llama", model)
    message = refusal(folder, UnsupportedModel)
    assert "LlamaForCausalLM: layer 0 passes `new_bias`" in message


def test_a_refused_model_still_runs_as_before(tmp_path: Path) -> None:
    """The registered functions are gone after an export, also one that failed."""
    from transformers import AttentionInterface
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
    from transformers.masking_utils import AttentionMaskInterface

    interfaces = (AttentionInterface, AttentionMaskInterface, type(ALL_EXPERTS_FUNCTIONS))
    before = [set(interface._global_mapping) for interface in interfaces]
    model = tiny.tiny_model("bloom", num_layers=2)
    refusal(tiny.save_target(tmp_path / "bloom", model), UnsupportedModel)
    assert [set(interface._global_mapping) for interface in interfaces] == before


def test_a_context_beyond_the_targets_is_refused(llama_folder: Path, tmp_path: Path) -> None:
    plan = tiny.tiny_plan(max_seq_len=513)
    with pytest.raises(ExportError, match=r"513.*512"):
        export(llama_folder, tmp_path / "out", plan=plan)
    assert not (tmp_path / "out").exists()
