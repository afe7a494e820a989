"""Losslessness and times of bundles on an NVIDIA GPU; says "no GPU" and exits 0 without one.

    python bench/gpu_check.py [BUNDLE...] [--backend ort-cuda] [--backend tensorrt-rtx]
        [--wheels FOLDER] [--cubin FILE] [--seconds 480] [--max-new-tokens 128] [--json OUT]

First the kernels and the driver alone (`gpu_kernels.py`), which needs no TensorRT; --cubin: the
kernels, compiled elsewhere by `gpu_check.py --compile 9.0 FILE`, where there is no NVRTC.
BUNDLE: exported with --lowering portable; several (a chain, a tree) make several rows of the table,
under each backend: those that are named, else ONNX Runtime's CUDA provider and every TensorRT that
are installed. Plan files that are missing or for another GPU are built with `eagle3 build`.
--wheels: packages that are not there are installed from this folder alone. What does not fit into
--seconds is left out and named. Each bundle: greedy and `coupled` texts with a draft against those
without, the first divergence with its margin and the noise between wide and narrow calls; tokens
per second; what a round costs, beside the time of its two halves on the device; waits and bytes of
a greedy round.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import click

PACKAGES = {  # backend -> required (module, package)
    "ort-cuda": ("onnxruntime", "onnxruntime-gpu"),
    "tensorrt": ("tensorrt", "tensorrt"),
    "tensorrt-rtx": ("tensorrt_rtx", "tensorrt-rtx"),
}
RULES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "coupled": {"temperature": 0.8, "acceptance": "coupled"},
}


@dataclass
class Equality:
    """One rule on all prompts. margins: at each divergence, the distance of the two most likely
    tokens.

    A divergence is a failure if its margin exceeds the noise. For sampled tokens the margin is not
    meaningful, so only float32 must be equal.
    """

    rule: str
    dtype: str
    texts: int = 0
    equal: int = 0
    noise: float = 0.0
    margins: list[float] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        if self.rule == "greedy":
            return all(margin <= self.noise for margin in self.margins)
        return self.dtype != "float32" or not self.margins


@dataclass
class Row:
    """One bundle under one backend. Times in milliseconds. host_ms: of a round, outside its halves
    on the device.
    """

    bundle: str
    backend: str
    equality: list[Equality] = field(default_factory=list)
    plain_tokens_per_second: float = 0.0
    draft_tokens_per_second: float = 0.0
    acceptance_length: float = 0.0
    round_ms: float = 0.0
    draft_half_ms: float = 0.0
    target_half_ms: dict[int, float] = field(default_factory=dict)
    waits: float = 0.0
    replays: float = 0.0
    bytes_to_host: float = 0.0
    left_out: list[str] = field(default_factory=list)

    @property
    def host_ms(self) -> float:
        return self.round_ms - self.draft_half_ms - max(self.target_half_ms.values(), default=0.0)


def find_gpu() -> str | None:
    """Return why there is no GPU, found without any package, or None if there is one."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        return str(error)
    count = ctypes.c_int(0)
    if library.cuInit(0) != 0 or library.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return "the driver does not start"
    return None if count.value else "the driver finds none"


def check_kernels(cubin: Path | None) -> str:
    """Compare random rounds without a model on the device with the same rounds in Python."""
    from gpu_kernels import KernelCheck

    from eagle3.runtime.gpu.cuda_driver import CudaDriver
    from eagle3.runtime.gpu.kernels import compile_kernels

    driver = CudaDriver()
    image = cubin.read_bytes() if cubin else compile_kernels(driver.compute_capability)
    accepted = KernelCheck(driver, image).run(200)
    said = f"{driver.device_name} ({driver.compute_capability}): kernels, copies and graphs agree"
    driver.close()
    return f"{said} with Python on 200 rounds, {accepted} draft tokens accepted"


def install(wheels: Path | None, backends: Sequence[str]) -> None:
    """Install packages that cannot be imported, from the folder alone."""
    needed = {"cuda": "cuda-bindings", "nvidia": "nvidia-cuda-nvrtc"}
    needed |= dict(PACKAGES[backend] for backend in backends)
    missing = [package for module, package in needed.items() if not _there(module)]
    if missing and wheels is not None:
        command = [sys.executable, "-m", "pip", "install", "--no-index", "--find-links"]
        subprocess.run([*command, str(wheels), *missing], check=True)


def _there(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def installed_backends() -> list[str]:
    """Return the backends that can be tried on this machine."""
    from eagle3.runtime.gpu.ort_cuda_engine import has_cuda_provider

    found = [name for name, (module, _) in PACKAGES.items() if _there(module)]
    return [name for name in found if name != "ort-cuda" or has_cuda_provider()]


def load(bundle: str, backend: str) -> Any:
    """Return the bundle's engine. Plan files are built first if none fit."""
    import eagle3
    from eagle3.runtime.errors import BuildError

    try:
        return eagle3.load(bundle, device="cuda", backend=backend)
    except BuildError as error:
        click.echo(f"building: {error}", err=True)
        command = [sys.executable, "-m", "eagle3.cli", "build", bundle, "--backend", backend]
        subprocess.run(command, check=True, stdout=sys.stderr)
        return eagle3.load(bundle, device="cuda", backend=backend)


def check(engine: Any, prompts: Sequence[str], rule: str, options: dict[str, Any]) -> Equality:
    """Compare texts with a draft with texts without."""
    found = Equality(rule, engine.plan.dtype)
    for seed, prompt in enumerate(prompts):
        asked = {**options, **RULES[rule], "seed": seed}
        plain, drafted = (
            engine.generate(prompt, drafter=drafter, logprobs=2, **asked)
            for drafter in ("none", engine.default_drafter)
        )
        bare = engine.generate(prompt, drafter=engine.default_drafter, **asked)
        found.texts += 1
        found.equal += bare.token_ids == plain.token_ids
        for other in (drafted, bare):
            at = first_difference(plain.token_ids, other.token_ids)
            if at is not None:
                found.margins.append(margin(plain.logprobs, at))
        at = first_difference(plain.token_ids, drafted.token_ids)
        pairs = zip(plain.logprobs[:at], drafted.logprobs[:at], strict=False)
        found.noise = max([found.noise, *(abs(a.logprob - b.logprob) for a, b in pairs)])
    return found


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    pairs = enumerate(zip(one, other, strict=False))
    at = next((index for index, (a, b) in pairs if a != b), None)
    return min(len(one), len(other)) if at is None and len(one) != len(other) else at


def margin(logprobs: Any, at: int) -> float:
    """Return the distance of the two most likely tokens."""
    if at >= len(logprobs) or len(logprobs[at].top) < 2:
        return float("inf")
    (_, first), (_, second) = logprobs[at].top[:2]
    return float(first - second)


def measure(engine: Any, prompts: Sequence[str], row: Row, options: dict[str, Any]) -> None:
    """Measure speed alternately, plain and with a draft, and the cost of rounds."""
    tokens, times, rounds, committed = [0, 0], [0.0, 0.0], 0, 0.0
    before = None
    for prompt in prompts:
        for index, drafter in enumerate(("none", engine.default_drafter)):
            before = engine.device.driver.counters.copy()
            stats = engine.generate(prompt, drafter=drafter, **options).stats
            tokens[index] += round(stats.rounds * stats.acceptance_length)
            times[index] += stats.decode_ms
        rounds += stats.rounds
        committed += stats.rounds * stats.acceptance_length
        cost = engine.device.driver.counters.since(before)
        row.replays += cost.replays
        row.waits += cost.synchronizations
        row.bytes_to_host += cost.bytes_to_host
    row.plain_tokens_per_second, row.draft_tokens_per_second = (
        1000 * count / spent for count, spent in zip(tokens, times, strict=True)
    )
    row.acceptance_length, row.round_ms = committed / rounds, times[1] / rounds
    row.replays, row.waits, row.bytes_to_host = (
        each / rounds for each in (row.replays, row.waits, row.bytes_to_host)
    )


def lines(row: Row) -> Iterator[str]:
    yield f"{row.bundle} ({row.backend})"
    for each in row.equality:
        verdict = "passed" if each.passed else "FAILED"
        margins = ", ".join(f"{value:.1e}" for value in each.margins) or "none"
        yield (
            f"  {each.rule}: {each.equal}/{each.texts} texts equal, margins of divergences:"
            f" {margins}, noise {each.noise:.1e}: {verdict}"
        )
    if row.round_ms:
        yield (
            f"  plain {row.plain_tokens_per_second:.1f} tok/s, draft"
            f" {row.draft_tokens_per_second:.1f} tok/s, tau {row.acceptance_length:.2f}"
        )
        halves = ", ".join(f"{width}: {ms:.3f}" for width, ms in row.target_half_ms.items())
        yield (
            f"  a round {row.round_ms:.3f} ms; draft half {row.draft_half_ms:.3f} ms, target half"
            f" by width {halves} ms; outside them {row.host_ms:.3f} ms"
        )
        yield (
            f"  a round, prefill shared out: {row.replays:.2f} replays, {row.waits:.2f} waits,"
            f" {row.bytes_to_host:.0f} bytes to the host"
        )
    for what in row.left_out:
        yield f"  left out, no time: {what}"


@click.command(help=__doc__.splitlines()[0])
@click.argument("bundles", nargs=-1)
@click.option("--backend", "backends", type=click.Choice([*PACKAGES]), multiple=True)
@click.option("--wheels", type=click.Path(exists=True, path_type=Path))
@click.option("--cubin", type=click.Path(exists=True, path_type=Path))
@click.option(
    "--compile", "compiled", nargs=2, help="Only write the kernels for CAPABILITY to FILE."
)
@click.option("--seconds", default=480.0, show_default=True, help="Stop starting things after.")
@click.option("--max-new-tokens", default=128, show_default=True)
@click.option("--first", default=4, show_default=True, help="Prompts of each measurement.")
@click.option("--json", "output", type=click.Path(path_type=Path))
def main(
    bundles: Sequence[str],
    backends: Sequence[str],
    wheels: Path | None,
    cubin: Path | None,
    compiled: tuple[str, str] | None,
    seconds: float,
    max_new_tokens: int,
    first: int,
    output: Path | None,
) -> None:
    if compiled:
        write_cubin(*compiled)
        return
    end = time.monotonic() + seconds
    reason = find_gpu()
    if reason is not None:
        click.echo(f"no GPU here ({reason}): nothing was checked")
        return
    install(wheels, backends if bundles else ())
    click.echo(check_kernels(cubin))
    rows: list[Row] = []
    options = {"max_new_tokens": max_new_tokens}
    for bundle, backend in product(bundles, backends or installed_backends()):
        rows.append(check_bundle(bundle, backend, end, first, options))
        click.echo("\n".join(lines(rows[-1])))
        if output is not None:
            output.write_text(json.dumps([asdict(each) for each in rows], indent=2))
    if not all(each.passed for row in rows for each in row.equality):
        sys.exit(1)


def write_cubin(capability: str, path: str) -> None:
    """Compile the kernels, which needs no GPU."""
    from eagle3.runtime.gpu.kernels import compile_kernels

    Path(path).write_bytes(compile_kernels(capability))


def check_bundle(bundle: str, backend: str, end: float, first: int, options: dict[str, Any]) -> Row:
    """Measure everything about one bundle that can be started before `end`."""
    from eagle3.runtime.text.prompt_files import PROMPTS

    row = Row(bundle, backend)
    if time.monotonic() > end:
        row.left_out = [*RULES, "times"]
        return row
    engine = load(bundle, backend)
    for rule in RULES:
        if time.monotonic() > end:
            row.left_out.append(rule)
        else:
            row.equality.append(check(engine, PROMPTS[:first], rule, options))
    if time.monotonic() > end:
        row.left_out.append("times")
    else:
        measure(engine, PROMPTS[:first], row, options)
        row.draft_half_ms = engine.device.half_ms(None) if engine.device.drafts else 0.0
        row.target_half_ms = {w: engine.device.half_ms(w) for w in engine.device.widths}
    engine.device.driver.close()
    return row


if __name__ == "__main__":
    main()
