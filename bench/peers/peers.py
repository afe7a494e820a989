"""Speed, memory and quality of eagle3 and of other systems, on the same prompts in the same run.

    python bench/peers/peers.py GGUF FILES... --bundle NAME=DIR ... --reference DIR
        [--first 10] [--max-new-tokens 128] [--repeat 1] [--peer NAME ...] [--environments DIR]

GGUF: the target that all systems run. FILES: jsonl with `turns` (the first is used) or `prompt`.
--bundle: bundles exported from the same target; each is a row for plain decoding and one for its
draft. --reference: the bundle in float32 whose logits KL divergence and agreement refer to. A peer
is installed into an environment of its own below --environments; one that cannot be installed or
run is a row that says why. All systems use the same token ids, decode greedily, and take turns
prompt by prompt; only eagle3 stops at EOS. Times are from the first new token to the last.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import numpy as np

import eagle3
from eagle3.runtime.bundle.folder import Bundle
from eagle3.runtime.ort.target_engine import TargetEngine
from eagle3.runtime.stats import Clock
from eagle3.runtime.trees.tree import Tree

sys.path.insert(0, str(Path(__file__).resolve().parent))
from worker import peak_rss  # noqa: E402

HERE = Path(__file__).resolve().parent
TEXTS = HERE.parents[1] / "export" / "checks" / "texts"
_TORCH = ("torch", "transformers", "gguf", "numpy")


@dataclass(frozen=True)
class Peer:
    """A system of `worker.py`: its kind, what it installs, and how its model is made."""

    kind: str
    packages: tuple[str, ...]
    prepare: Callable[[Path, Path, Path], str]  # python, GGUF file, folder -> model


def _as_it_is(_python: Path, gguf: Path, _folder: Path) -> str:
    return str(gguf)


def _requantized(python: Path, gguf: Path, folder: Path) -> str:
    """Return the model in Q8_0, made by llama.cpp's own quantization."""
    out = folder / f"{gguf.name.split('.')[0]}.Q8_0.gguf"
    if not out.exists():
        code = (
            "import sys, llama_cpp as l\n"
            "p = l.llama_model_quantize_default_params()\n"
            "p.ftype, p.allow_requantize = 7, True\n"
            "sys.exit(l.llama_model_quantize(sys.argv[1].encode(), sys.argv[2].encode(), p))\n"
        )
        _run([str(python), "-c", code, str(gguf), str(out)])
    return str(out)


def _built(precision: str) -> Callable[[Path, Path, Path], str]:
    def build(python: Path, gguf: Path, folder: Path) -> str:
        """Return a folder that GenAI's model builder wrote from the weights in float32."""
        out, source = folder / f"model-{precision}", folder / "source"
        if not (out / "genai_config.json").exists():
            code = (
                "import sys\n"
                "from transformers import AutoModelForCausalLM, AutoTokenizer\n"
                "a = dict(pretrained_model_name_or_path=sys.argv[1], gguf_file=sys.argv[2])\n"
                "m = AutoModelForCausalLM.from_pretrained(**a)\n"
                "m.is_quantized, m.hf_quantizer = False, None\n"
                "del m.config.quantization_config\n"
                "m.save_pretrained(sys.argv[3])\n"
                "AutoTokenizer.from_pretrained(**a).save_pretrained(sys.argv[3])\n"
            )
            if not (source / "config.json").exists():
                where = [str(gguf.parent), gguf.name, str(source)]
                _run([str(python), "-c", code, *where])
            module = "onnxruntime_genai.models.builder"
            options = ["-i", str(source), "-o", str(out), "-p", precision, "-e", "cpu"]
            _run([str(python), "-m", module, *options, "-c", str(folder / "cache")])
        return str(out)

    return build


_BUILDER = ("onnxruntime-genai", "onnx", "onnx_ir", "onnxruntime", *_TORCH)
PEERS: dict[str, Peer] = {
    "transformers fp32": Peer("transformers", _TORCH, _as_it_is),
    "transformers fp32, prompt lookup": Peer("transformers-lookup", _TORCH, _as_it_is),
    "ORT GenAI fp32": Peer("ort-genai", _BUILDER, _built("fp32")),
    "ORT GenAI int4": Peer("ort-genai", _BUILDER, _built("int4")),
    "OpenVINO GenAI, GGUF": Peer("openvino", ("openvino-genai", "numpy"), _as_it_is),
    "llama.cpp, GGUF": Peer("llama.cpp", ("llama-cpp-python", "numpy"), _as_it_is),
    "llama.cpp, Q8_0": Peer("llama.cpp", ("llama-cpp-python", "numpy"), _requantized),
}


class Failed(Exception):
    """Why a peer has no numbers."""


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines() or ["it failed"]
        raise Failed(lines[-1][:160])


def installed(peer: Peer, environments: Path) -> Path:
    """Return the python of the environment with a peer's packages. Raises Failed."""
    folder = environments / "-".join(peer.packages).lower()[:60]
    python = folder / "bin" / "python"
    done = folder / "installed"
    if not done.exists():
        _run([sys.executable, "-m", "venv", "--clear", str(folder)])
        _run([str(python), "-m", "pip", "install", "--quiet", *peer.packages])
        done.touch()
    return python


@dataclass
class Row:
    """What one system did."""

    name: str
    tokens: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    rss: int = 0
    quality: str = ""
    failed: str = ""

    def add(self, task: str, tokens: int, seconds: float, rss: int) -> None:
        self.tokens[task] = self.tokens.get(task, 0) + tokens
        self.seconds[task] = self.seconds.get(task, 0.0) + seconds
        self.rss = max(self.rss, rss)

    def speed(self, task: str) -> float:
        """Tokens per second."""
        return self.tokens[task] / self.seconds[task]

    @property
    def mean_speed(self) -> float:
        return float(np.mean([self.speed(task) for task in self.tokens]))


class Process:
    """A peer's worker."""

    def __init__(self, command: Sequence[str]) -> None:
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True
        )
        self._answer()

    def ask(self, order: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the reason is in what it wrote last
            print(json.dumps(order), file=self._process.stdin, flush=True)
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                found: dict[str, Any] = json.loads(line)
                return found
        self._errors.seek(0)
        lines = self._errors.read().strip().splitlines() or ["it ended without an answer"]
        raise Failed(lines[-1][:160])

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def serve(bundle: str, drafter: str, threads: int) -> None:
    """Run a bundle as a worker does, in a process of its own."""
    engine = eagle3.load(bundle, threads=threads)
    name = None if drafter == "draft" else drafter
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        result = engine.generate(order["ids"], max_new_tokens=order["new"], drafter=name)
        answer = {
            "ids": list(result.token_ids),
            "tokens": len(result.token_ids) - 1,
            "seconds": result.stats.decode_ms / 1e3,
            "rss": peak_rss(),
        }
        print(json.dumps(answer), flush=True)


def logits_of(bundle: Path, ids: Sequence[int], threads: int) -> Any:
    """Return the logits [T,V] of a text in a bundle's own plain decoding."""
    engine = TargetEngine(Bundle.open(bundle), threads, Clock())
    width, rows = 17, []
    for first in range(0, len(ids), width):
        part = list(ids[first : first + width])
        out = engine.verify(Tree.chain(part[0], part[1:]), first, want_logits=True)
        engine.keep(first, tuple(range(1, len(part))))
        assert out.logits is not None
        rows.append(out.logits.copy())
    return np.concatenate(rows)


def log_softmax(logits: Any) -> Any:
    shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def quality_text(reference: Sequence[Any], found: Sequence[Any]) -> str:
    """Return mean KL divergence and agreement of logits, one array for each text."""
    kl, same = [], []
    for ours, theirs in zip(reference, found, strict=True):
        p, q = log_softmax(ours), log_softmax(theirs[:, : ours.shape[1]])
        kl += (np.exp(p) * (p - q)).sum(-1).tolist()
        same += (p.argmax(-1) == q.argmax(-1)).tolist()
    return f"{np.mean(kl):.4f} {np.mean(same):7.1%}"


def prompts_of(path: Path, first: int) -> list[str]:
    rows = [json.loads(line) for line in path.read_text().splitlines()[:first]]
    return [row["turns"][0] if "turns" in row else row["prompt"] for row in rows]


@dataclass
class Systems:
    """All rows and their processes; those that fail lose their process."""

    rows: list[Row] = field(default_factory=list)
    running: dict[str, Process] = field(default_factory=dict)

    def start(self, name: str, command: Callable[[], Sequence[str]]) -> None:
        row = Row(name)
        self.rows.append(row)
        self._guard(row, lambda: self.running.__setitem__(name, Process(command())))

    def decode(self, task: str, ids: list[int], count: int) -> None:
        for row in self.rows:
            process = self.running.get(row.name)
            if process is not None:

                def add(row: Row = row, process: Process = process) -> None:
                    out = process.ask({"ids": ids, "new": count})
                    row.add(task, out["tokens"], out["seconds"], out["rss"])

                self._guard(row, add)

    def measure_quality(self, texts: Sequence[list[int]], reference: Sequence[Any]) -> None:
        for row in self.rows:
            process = self.running.get(row.name)
            if process is None or row.quality:
                continue
            found = []
            for ids in texts:
                out = process.ask({"logits": ids})
                if "error" in out:
                    row.quality = f"({out['error'][:40]})"
                    break
                found.append(np.load(out["file"]))
                os.unlink(out["file"])
            else:
                row.quality = quality_text(reference, found)

    def close(self) -> None:
        for process in self.running.values():
            process.close()

    def _guard(self, row: Row, action: Callable[[], None]) -> None:
        try:
            action()
        except Failed as error:
            row.failed = str(error)
            if row.name in self.running:
                self.running.pop(row.name).close()


def table(rows: Sequence[Row], tasks: Sequence[str]) -> list[str]:
    """Return the result as lines: tokens per second of each task, their mean, its ratio to the
    fastest peer, peak resident memory, KL divergence in nats and agreement of the best token.
    """
    ran = [row for row in rows if not row.failed and row.tokens]
    peers = [row.mean_speed for row in ran if not row.name.startswith("eagle3")]
    best = max(peers, default=float("nan"))
    width = max(len(row.name) for row in rows)
    head = " ".join(f"{task[:9]:>9}" for task in tasks)
    lines = [f"{'tokens/s':{width}} {head} {'mean':>7} {'ratio':>6} {'MB':>5}  {'KL':>6} same"]
    for row in rows:
        if row not in ran:
            lines.append(f"{row.name:{width}} {row.failed or 'nothing decoded'}")
            continue
        speeds = " ".join(f"{row.speed(task):9.1f}" for task in tasks)
        lines.append(
            f"{row.name:{width}} {speeds} {row.mean_speed:7.1f} {row.mean_speed / best:6.2f}"
            f" {row.rss / 1e6:5.0f}  {row.quality}"
        )
    return lines


def cpu_name() -> str:
    text = Path("/proc/cpuinfo").read_text()
    name = next(line.split(":")[1].strip() for line in text.splitlines() if "model name" in line)
    return f"{name}, {'with' if 'avx512_vnni' in text or 'avx_vnni' in text else 'without'} VNNI"


@click.command()
@click.argument("gguf", type=click.Path(exists=True, path_type=Path))
@click.argument("files", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path))
@click.option("--bundle", "bundles", multiple=True, required=True, metavar="NAME=DIR")
@click.option("--reference", required=True, type=click.Path(exists=True, path_type=Path))
@click.option("--first", default=10, help="Prompts of each file.")
@click.option("--max-new-tokens", default=128)
@click.option("--repeat", default=1, help="Passes over all prompts.")
@click.option("--peer", "names", multiple=True, type=click.Choice(list(PEERS)))
@click.option("--environments", type=click.Path(path_type=Path), default=Path("build/peers"))
@click.option("--threads", default=2)
def main(
    gguf: Path,
    files: tuple[Path, ...],
    bundles: tuple[str, ...],
    reference: Path,
    first: int,
    max_new_tokens: int,
    repeat: int,
    names: tuple[str, ...],
    environments: Path,
    threads: int,
) -> None:
    systems, environments = Systems(), environments.resolve()
    engine = eagle3.load(str(reference), threads=threads)
    encoded = {f.stem: [engine.encode(p) for p in prompts_of(f, first)] for f in files}
    texts = [engine.encode(t.read_text(), chat=False)[:768] for t in sorted(TEXTS.glob("*.txt"))]
    logits = [logits_of(reference, ids, threads) for ids in texts]
    for each in bundles:
        name, _, folder = each.partition("=")
        found = quality_text(logits, [logits_of(Path(folder), ids, threads) for ids in texts])
        for drafter in ("none", "draft"):
            row = f"eagle3 {name}, {'plain' if drafter == 'none' else 'with its draft'}"
            command = [sys.executable, str(Path(__file__)), "--serve", folder, drafter]
            systems.start(row, lambda command=command: [*command, str(threads)])  # type: ignore[misc]
            systems.rows[-1].quality = found
    for name in names or PEERS:
        peer = PEERS[name]

        def command(peer: Peer = peer) -> list[str]:
            python = installed(peer, environments)
            model = peer.prepare(python, gguf.resolve(), python.parents[1])
            return [str(python), str(HERE / "worker.py"), peer.kind, model, str(threads)]

        systems.start(name, command)
        print(f"{name}: {systems.rows[-1].failed or 'ready'}", file=sys.stderr, flush=True)
    del engine
    for number in range(repeat):
        for task, prompts in encoded.items():
            start = time.perf_counter()
            for ids in prompts:
                systems.decode(task, ids, max_new_tokens)
            took = time.perf_counter() - start
            print(f"pass {number + 1}: {task} {took:.0f} s", file=sys.stderr, flush=True)
    systems.measure_quality(texts, logits)
    systems.close()
    print(f"{cpu_name()}, {threads} threads; {first} prompts of each file, {max_new_tokens} tokens")
    print("\n".join(table(systems.rows, list(encoded))))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(sys.argv[2], sys.argv[3], int(sys.argv[4]))
    else:
        main()
