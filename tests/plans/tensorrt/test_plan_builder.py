"""Builds of exported graphs: a tiny Llama and a tiny Qwen3 with heads, in float16 and bfloat16.

TensorRT-RTX builds without a GPU and executes nothing here. ONNX Runtime executes the same graphs.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
from click.testing import CliRunner
from tensorrt_graphs import CachedAttention, widened

from eagle3.cli import main
from eagle3.export.checks.self_check import TOLERANCE, check_bundle
from eagle3.export.draft_graphs.head_modules import build_head
from eagle3.export.drafts.head_draft import HeadDraft
from eagle3.export.heads.head_config import TargetSizes
from eagle3.export.heads.reader import read_head
from eagle3.export.publish import check_output
from eagle3.export.targets.target import TORCH_DTYPES, load_target
from eagle3.plans.lint.tensorrt_lint import lint
from eagle3.plans.tensorrt import plan_builder as tensorrt_build
from eagle3.plans.tensorrt.build_log import BuildProgress, captured
from eagle3.plans.tensorrt.build_request import BuildRequest
from eagle3.plans.tensorrt.library import Library, find_library, polygraphy_of
from eagle3.plans.tensorrt.network import check_network, parse
from eagle3.plans.tensorrt.plan_builder import build_bundle
from eagle3.plans.tensorrt.plan_files import PlanFile, set_folder, usable_plan_files
from eagle3.runtime.bundle.folder import Bundle
from eagle3.runtime.bundle.manifest import EngineInfo
from eagle3.runtime.errors import BuildError, ExportError

trt = pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX is not installed")
pytest.importorskip("polygraphy", reason="polygraphy is not installed")

pytestmark = pytest.mark.slow

LAYERS = 2
DRAFT = "eagle3.draft"
ENGINES = ["target", "eagle3.draft_fuse", DRAFT, "eagle3.draft_tree"]
REQUEST = BuildRequest(compute_capability="8.9")
CASES = [("llama", "float16"), ("qwen3", "bfloat16")]  # test_smollm.py has a Llama in both dtypes
# TensorRT-RTX has fused attention for head sizes from 16 on; the head of `qwen3` has 8.
HEAD_SIZE = {"llama": 16, "qwen3": 8}

Made = tuple[Path, Path, Bundle]
"""Folder of the target, folder of the head, and their bundle."""


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Made]:
    """Return a function (architecture, dtype) -> `Made` that exports each combination once."""
    checkpoints: dict[str, tuple[Path, Path]] = {}
    made: dict[tuple[str, str], Made] = {}

    def checkpoint(name: str) -> tuple[Path, Path]:
        folder = tmp_path_factory.mktemp(name)
        model = tiny.tiny_model(name, num_layers=LAYERS, scale=2.0, head_dim=16)
        tiny.jitter_vectors(model)
        head: dict[str, Any] = {"draft_vocab_size": 40, "aux_layer_ids": (0, 1, 2)}
        tiny.save_head(folder / "head", model, head_dim=HEAD_SIZE[name], **head)
        return tiny.save_target(folder / "target", model), folder / "head"

    def export(name: str, dtype: str) -> Made:
        if name not in checkpoints:
            checkpoints[name] = checkpoint(name)
        if (name, dtype) not in made:
            target, head = checkpoints[name]
            output = tmp_path_factory.mktemp("bundles") / f"{name}-{dtype}"
            backend = "ort-cuda" if dtype == "bfloat16" else "ort-cpu"
            plan = tiny.tiny_plan(lowering="portable", dtype=dtype, backend=backend)
            made[name, dtype] = (target, head, tiny.export_tiny(target, head, output, plan))
        return made[name, dtype]

    return export


@pytest.fixture
def llama16(exported: Callable[[str, str], Made], tmp_path: Path) -> Bundle:
    """A copy of the bundle of the float16 Llama, which a test may modify."""
    copy = tmp_path / "bundle"
    shutil.copytree(exported("llama", "float16")[2].root, copy)
    shutil.rmtree(copy / "plans", ignore_errors=True)
    return Bundle.open(copy)


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_every_engine_compiles_with_every_profile(
    exported: Callable[[str, str], Made], name: str, dtype: str, capfd: pytest.CaptureFixture[str]
) -> None:
    bundle = exported(name, dtype)[2]
    capfd.readouterr()
    said: list[str] = []
    files = {each.engine: each for each in build_bundle(bundle.root, REQUEST, said.append)}
    assert capfd.readouterr().out == ""  # stdout is reserved for results
    assert list(files) == ENGINES
    for engine, each in files.items():
        content = each.path.read_bytes()
        assert content[:4] == b"vtrt" and len(content) == each.size
        assert [profile.name for profile in each.profiles] == ["verify", "prefill"]
        assert set(each.profiles[0].ranges) == {
            spec.name for spec in bundle.manifest.engines[engine].inputs
        }
    counts = {engine: each.counts for engine, each in files.items()}
    assert (counts["target"].cache_updates, counts[DRAFT].cache_updates) == (2 * LAYERS, 2)
    assert counts["target"].attentions == counts["target"].fused_attentions == LAYERS
    assert counts[DRAFT].attentions == 1 and counts["eagle3.draft_fuse"].attentions == 0
    assert counts[DRAFT].fused_attentions == (name == "llama")
    assert any("draft: tensorrt-rtx has no fused" in line for line in said) == (name == "qwen3")
    assert len(files["target"].aliases) == 2 * LAYERS
    assert files["target"].aliases["present_v.1"] == "past_v.1"
    # The draft uses the target's embedding, so it must be rebuilt for another target.
    assert set(files[DRAFT].sources) >= {
        f"{DRAFT}.onnx",
        f"{DRAFT}.onnx.data",
        "target.onnx.data",
    }


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_onnx_runtime_runs_the_float16_files(
    exported: Callable[[str, str], Made], name: str
) -> None:
    """The self-check of the export ran them, and the hashes show that they are the same files."""
    bundle = exported(name, "float16")[2]
    bundle.verify_hashes()
    assert bundle.manifest.draft is not None
    for check in (bundle.manifest.self_check, bundle.manifest.draft.checks):
        errors = check["relative_errors"]
        assert len(errors) >= 4 and max(errors.values()) <= TOLERANCE["float16"]


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_the_bfloat16_graphs_compute_what_pytorch_does(
    exported: Callable[[str, str], Made], name: str, tmp_path: Path
) -> None:
    """ONNX Runtime's CPU provider has no bfloat16, so the graphs are cast to float32 and compared
    with PyTorch in float32. The weights keep their rounding to bfloat16; only the rounding of
    activations is not tested.
    """
    folder, head_folder, bundle = exported(name, "bfloat16")
    wide = _wide_bundle(bundle, tmp_path / "wide")
    target = load_target(str(folder), "bfloat16", max_seq_len=128)
    target.model.float()
    facts = TargetSizes(tiny.HIDDEN, target.vocab_size, LAYERS)
    head = read_head(str(head_folder), facts)
    module = build_head(head, TORCH_DTYPES["bfloat16"]).float()
    table = target.model.get_input_embeddings().weight.detach()
    draft = HeadDraft(head, module, table)
    check = check_bundle(wide, target, {"eagle3": draft}, lambda _: None)
    assert max(check.engines["relative_errors"].values()) <= TOLERANCE["float32"]
    assert max(check.drafts["eagle3"]["relative_errors"].values()) <= TOLERANCE["float32"]


def _wide_bundle(bundle: Bundle, folder: Path) -> Bundle:
    def wide(info: EngineInfo) -> EngineInfo:
        ins, outs = (
            tuple(replace(s, dtype=s.dtype.replace("bfloat16", "float32")) for s in specs)
            for specs in (info.inputs, info.outputs)
        )
        return replace(info, inputs=ins, outputs=outs)

    engines = bundle.manifest.engines
    files: dict[str, bytes | None] = {
        info.file: widened(bundle.path(info.file)) for info in engines.values()
    }
    plan = replace(bundle.manifest.plan, dtype="float32", backend="ort-cpu")
    wider = {name: wide(info) for name, info in engines.items()}
    return tiny.edited_bundle(bundle, folder, files, plan=plan, engines=wider)


def test_what_is_up_to_date_is_kept(llama16: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    first = build_bundle(llama16.root, REQUEST)
    found = usable_plan_files(llama16, "tensorrt-rtx", trt.__version__, "8.9")
    assert list(found.values()) == first
    built = _count_builds(monkeypatch)
    said: list[str] = []
    assert build_bundle(llama16.root, REQUEST, said.append) == first
    assert built == [] and all("up to date" in line for line in said)
    # Widths that do not change a range change no plan file, but its JSON, which the runtime reads.
    widths = replace(REQUEST, verify_widths=(1, 7, 33))
    again = build_bundle(llama16.root, widths)
    assert built == [] and {each.request.verify_widths for each in again} == {(1, 7, 33)}
    # A damaged plan file or JSON is built again; the others are kept.
    first[1].path.write_bytes(b"vtrt, but not all of it")
    first[2].note_path.write_text("{}")
    build_bundle(llama16.root, widths)
    assert built == ENGINES[1:3]
    assert usable_plan_files(llama16, "tensorrt-rtx", trt.__version__, "8.9")
    built.clear()
    build_bundle(llama16.root, replace(widths, workspace_bytes=1 << 28))
    assert built == ENGINES


def _count_builds(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    built: list[str] = []
    compile_ = tensorrt_build._compile

    def counted(job: Any, *rest: Any) -> Any:
        built.append(job.engine)
        return compile_(job, *rest)

    monkeypatch.setattr(tensorrt_build, "_compile", counted)
    return built


def test_each_library_is_told_what_it_reads(llama16: Bundle) -> None:
    """Only `tensorrt` gets a timing cache, because TensorRT-RTX does not time kernels."""
    request = replace(REQUEST, workspace_bytes=1 << 20)
    job = tensorrt_build._job(llama16, "target", request, find_library("tensorrt-rtx"))
    options = tensorrt_build._options(job, None)
    assert options.pop("memory_pool_limits") == {trt.MemoryPoolType.WORKSPACE: 1 << 20}
    assert options == {"progress_monitor": None, "compute_capabilities": [(8, 9)]}
    job = replace(job, request=REQUEST, library=Library("tensorrt", trt, "11.0"))
    cache = llama16.root / "plans" / "tensorrt-sm89" / "timing.cache"
    expected = {"progress_monitor": None, "load_timing_cache": str(cache)}
    assert tensorrt_build._options(job, None) == expected


def test_float32_attention_is_taken_apart(windowed_bundle: Bundle, tmp_path: Path) -> None:
    """The target has a sliding window, which is part of the mask and not an attribute."""
    shutil.copytree(windowed_bundle.root, tmp_path / "bundle")
    said: list[str] = []
    built = build_bundle(tmp_path / "bundle", REQUEST, said.append)
    target, draft = (each for each in built if each.engine in ("target", DRAFT))
    assert (target.counts.attentions, target.counts.fused_attentions) == (3, 0)
    assert (draft.counts.attentions, draft.counts.fused_attentions) == (1, 0)
    assert not any("no fused" in line for line in said)  # expected for float32, so not reported


def _refused(root: Path, message: str, request: BuildRequest = REQUEST) -> None:
    with pytest.raises(BuildError, match=message):
        build_bundle(root, request)
    assert not list(root.glob("plans/*/*.plan"))


def test_the_other_lowering_is_refused(bundle: Bundle) -> None:
    _refused(bundle.root, "--lowering ort.* again with --lowering portable --dtype float16")


def test_a_gpu_that_the_library_does_not_know_is_refused(llama16: Bundle) -> None:
    other = replace(REQUEST, compute_capability="9.0")
    _refused(llama16.root, "capability 9.0 is not supported by", other)


def test_a_full_disk_is_said_before_the_long_work(
    llama16: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(llama16.root)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    _refused(
        llama16.root, r"4 plan files need about [\d,]+ bytes, .* has 1,000 free: free disk space"
    )


def test_a_disk_that_fills_up_is_said(llama16: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    _refused(llama16.root, "target.plan cannot be written: No space left on device")


def test_altered_weights_are_refused(llama16: Bundle) -> None:
    path = llama16.path("target.onnx.data")
    content = bytearray(path.read_bytes())
    content[100] ^= 1
    path.write_bytes(content)
    # Opening a bundle checks the hashes of small files; those of large files are checked here.
    with pytest.raises(BuildError, match=r"target.onnx.data does not match its SHA-256"):
        jobs = [tensorrt_build._job(llama16, "target", REQUEST, find_library())]
        tensorrt_build._check_sources(llama16, jobs)


def test_ctrl_c_ends_a_build_and_leaves_nothing_half(
    llama16: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[str] = []

    def interrupt(progress: BuildProgress) -> None:
        shown.append(progress.title)
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(BuildProgress, "show", interrupt)
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        build_bundle(llama16.root, REQUEST)
    assert set(shown) == {"target"} and signal.getsignal(signal.SIGINT) is before
    folder = set_folder(llama16.root, "tensorrt-rtx", "8.9")
    assert not [path for path in folder.iterdir() if path.suffix in (".plan", ".json", ".partial")]


def test_export_replaces_a_bundle_with_plan_files(llama16: Bundle) -> None:
    build_bundle(llama16.root, REQUEST)
    check_output(llama16.root, force=True)
    (llama16.root / "plans" / "mine.txt").write_text("mine")
    with pytest.raises(ExportError, match="does not list plans/mine.txt"):
        check_output(llama16.root, force=True)


@pytest.fixture(scope="module")
def small_plan(exported: Callable[[str, str], Made]) -> Iterator[PlanFile]:
    yield build_bundle(exported("llama", "float16")[2].root, REQUEST)[0]


def test_the_commands_show_them(small_plan: PlanFile, exported: Callable[[str, str], Made]) -> None:
    root = str(exported("llama", "float16")[2].root)
    run = CliRunner().invoke
    built = run(main, ["build", root, "--compute-capability", "8.9"])
    assert built.exit_code == 0 and built.stderr.count("up to date") == 4
    assert "target: " in built.stdout and "4 cache updates in place, 2 of 2" in built.stdout
    shown = run(main, ["inspect", root])
    assert shown.exit_code == 0 and shown.stdout.count("plan file ") == 4
    data = json.loads(run(main, ["build", root, "--compute-capability", "8.9", "--json"]).stdout)
    assert data["plan_files"][0]["key"] == small_plan.key
    wrong = run(main, ["build", root, "--compute-capability", "9.0"])
    assert wrong.exit_code == 1 and "capability 9.0 is not supported" in wrong.stderr


class _Parsed:
    """A graph made by the test, parsed without the lint."""

    def __init__(self, graph: CachedAttention, folder: Path) -> None:
        self.library = find_library("tensorrt-rtx")
        self.polygraphy = polygraphy_of(self.library)
        self.path = folder / "layer.onnx"
        self.path.write_bytes(graph.model().SerializeToString())

    def network(self) -> Any:
        with captured(self.polygraphy) as log:
            self.parsed = parse(self.polygraphy, self.library, self.path, log)
        return self.parsed[1]


def test_an_input_that_tensorrt_drops_is_an_error(tmp_path: Path) -> None:
    """TensorRT ignores nonpad_kv_seqlen, and `check_network` detects it even without the lint."""
    graph = CachedAttention()
    facts = lint(graph.model(), "layer.onnx")
    parsed = _Parsed(graph, tmp_path)
    counts = check_network(parsed.network(), parsed.library, facts, "layer.onnx")
    assert (counts["KV_CACHE_UPDATE"], counts["ATTENTION_INPUT"]) == (2, 1)
    graph.inputs["lengths"] = graph.inputs["past_len"].__class__.FromString(
        graph.inputs["past_len"].SerializeToString()
    )
    graph.inputs["lengths"].name = "lengths"
    graph.attention.input.extend(["", "", "lengths"])
    parsed, facts = _Parsed(graph, tmp_path), replace(facts, inputs=(*facts.inputs, "lengths"))
    with pytest.raises(
        BuildError, match="parsed layer.onnx incorrectly: the network ignores the inputs lengths"
    ):
        check_network(parsed.network(), parsed.library, facts, "layer.onnx")


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ("num_cache_updates", "expected 5 KV_CACHE_UPDATE layers, got 2"),
        ("num_attentions", "expected 5 ATTENTION_INPUT layers, got 1"),
    ],
)
def test_layers_are_counted(tmp_path: Path, field: str, message: str) -> None:
    graph = CachedAttention()
    facts: Any = replace(lint(graph.model(), "layer.onnx"), **{field: 5})
    parsed = _Parsed(graph, tmp_path)
    with pytest.raises(BuildError, match=message):
        check_network(parsed.network(), parsed.library, facts, "layer.onnx")


def test_the_parser_s_reasons_are_told(tmp_path: Path) -> None:
    graph = CachedAttention()
    graph.set(graph.attention, "softcap", 30.0)  # TensorRT itself rejects this
    with pytest.raises(BuildError, match=r"cannot read .*layer.onnx: .*(softcap|Attention|attend)"):
        _Parsed(graph, tmp_path).network()
