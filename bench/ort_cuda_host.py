"""What ONNX Runtime's CUDA provider asks of CUDA for a bundle's graphs, watched without a GPU.

    python bench/ort_cuda_host.py BUNDLE --onnxruntime FOLDER [--include FOLDER] [--width 8]

BUNDLE: exported with --lowering portable. The first FOLDER: an unpacked onnxruntime-gpu wheel; the
provider in it is the real one. The CUDA libraries that it loads are replaced by `cuda_on_host.c`,
whose memory is the host's and whose kernels compute nothing (needs a C compiler, nm, and CUDA's
headers: `pip install nvidia-cuda-runtime`). So it shows where the nodes go and what a call asks of
CUDA, and no number. For `target` and `draft_tree`: that every node is on the GPU; what a later call
of the same shapes consists of (launches and copies on the device; no wait, no allocation, nothing
on the host), from this thread and from another; the same with the provider's own CUDA graphs.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import threading
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import click
import numpy as np

STREAM = 0x57AEA
SOURCE = Path(__file__).with_name("cuda_on_host.c")
CUDA = re.compile(r"(?P<name>(__)?cu(da|blas|rand|Tensor)\w*)(@+(?P<library>lib\S+))?$")
ELEMENTS = {
    "float": (1, 4),
    "float16": (10, 2),
    "bfloat16": (16, 2),
    "int64": (7, 8),
    "bool": (9, 1),
}
HARMLESS = {"launch", "copy on the device", "fill"}


def build(provider: Path, include: Path, folder: Path) -> None:
    """Build libraries under the names that the provider was linked with, all from one source."""
    listed = subprocess.run(
        ["nm", "-D", "--undefined-only", str(provider)], capture_output=True, text=True, check=True
    )
    wanted: dict[str, set[str]] = defaultdict(set)
    for word in (line.split()[-1] for line in listed.stdout.splitlines()):
        if found := CUDA.match(word):
            wanted[found["library"] or "libcuda.so.1"].add(found["name"])
    linked = subprocess.run(["ldd", str(provider)], capture_output=True, text=True, check=True)
    for name in re.findall(r"(libcu\w+\.so\.\d+)", linked.stdout):
        wanted.setdefault(name, set())
    own = set(re.findall(r"(\w+)\([^;]*?\) \{", SOURCE.read_text()))
    for library, names in wanted.items():
        stubs = folder / f"{library}.c"
        stubs.write_text("".join(f"long {each}(void) {{ return 0; }}\n" for each in names - own))
        versions = folder / f"{library}.map"
        versions.write_text(f"{library} {{ global: *; }};\n")
        sources = [str(stubs), *([str(SOURCE)] if names & own else [])]
        command = ["cc", "-w", "-shared", "-fPIC", f"-I{include}", *sources]
        marks = [f"-Wl,-soname,{library}", f"-Wl,--version-script={versions}"]
        subprocess.run([*command, "-o", str(folder / library), *marks], check=True)


class Watch:
    """Reads the log of CUDA runtime calls."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        os.set_inheritable(self._write, True)

    @property
    def number(self) -> str:
        return str(self._write)

    def seen(self) -> Counter[str]:
        """Return the calls since the previous read."""
        said = b""
        while True:
            try:
                said += os.read(self._read, 1 << 16)
            except BlockingIOError:
                return Counter(said.decode().splitlines())


def session(library: Any, path: str, own_graphs: bool) -> Any:
    """Create a session as the runtime does, or with the provider's own graphs."""
    from eagle3.runtime.gpu import ort_cuda_engine as ort_engine

    settings = ort_engine.provider_options(STREAM)
    if own_graphs:
        settings["enable_cuda_graph"] = "1"
    with mock.patch.object(ort_engine, "provider_options", lambda _: settings):
        return library.session(Path(path), Path(path).stem, STREAM)


def binding(made: Any, width: int, kept: list[Any]) -> Any:
    """Bind every tensor to some memory, with a cache's past and present at one address."""
    io, places, sizes = made.io_binding(), {}, {"B": 1, "N": width, "M": width}
    for bind, values in (
        (io.bind_input, made.get_inputs()),
        (io.bind_output, made.get_outputs()),
    ):
        for value in values:
            shape = [sizes.get(dim, dim) for dim in value.shape]
            element, item = ELEMENTS[value.type[7:-1]]
            name = value.name.replace("present_", "past_")
            if name not in places:
                kept.append(np.zeros(int(np.prod(shape)) * item, np.uint8))
                places[name] = kept[-1].ctypes.data
            bind(value.name, "cuda", 0, element, shape, places[name])
    return io


def report(library: Any, path: str, width: int, watch: Watch) -> Iterator[tuple[str, bool]]:
    """Yield lines about one graph, and whether each is as expected."""
    for own_graphs in (False, True):
        made, asked, kept = session(library, path, own_graphs), library.run_options(), []
        if own_graphs:
            asked.add_run_config_entry("gpu_graph_id", "1")
        io = binding(made, width, kept)
        for _ in range(2):
            made.run_with_iobinding(io, asked)
        watch.seen()
        calls = []
        for _ in range(2):
            made.run_with_iobinding(io, asked)
            calls.append(watch.seen())
        for _ in range(2):
            thread = threading.Thread(target=made.run_with_iobinding, args=(io, asked))
            thread.start()
            thread.join()
            calls.append(watch.seen())
        mine, theirs = calls[1], calls[3]
        kind = "with the provider's own graphs" if own_graphs else "as it is used here"
        said = f"{kind}, a call: {_in_words(mine)}; from another thread: {_in_words(theirs)}"
        yield said, own_graphs or (set(mine) <= HARMLESS and mine == theirs == calls[0])


def _in_words(counts: Counter[str]) -> str:
    return ", ".join(f"{count} x {what}" for what, count in sorted(counts.items())) or "nothing"


def engines(bundle: str) -> Iterable[str]:
    paths = [Path(bundle) / "target.onnx", *sorted(Path(bundle).glob("*.draft_tree.onnx"))]
    return [str(path) for path in paths]


def watched(bundle: str, wheel: str, width: int) -> bool:
    """Run the checks in a process whose CUDA libraries are replaced."""
    sys.path.insert(0, wheel)
    watch = Watch()
    os.environ["CUDA_ON_HOST"] = watch.number
    from eagle3.runtime.bundle.folder import Bundle
    from eagle3.runtime.gpu.ort_cuda_engine import OrtCuda, load_ort_engines

    library, well = OrtCuda(), True
    driver: Any = SimpleNamespace(stream=STREAM)
    load_ort_engines(Bundle.open(bundle), library, driver)  # this also compares the tensors
    for path in engines(bundle):
        version = library.module.__version__
        click.echo(f"{Path(path).name}: every node on the GPU, onnxruntime-gpu {version}")
        for line, as_expected in report(library, path, width, watch):
            click.echo(f"  {line}{'' if as_expected else '  <- NOT FIT FOR A CAPTURE'}")
            well = well and as_expected
    return well


@click.command(help=__doc__.splitlines()[0])
@click.argument("bundle", type=click.Path(exists=True))
@click.option("--onnxruntime", "wheel", required=True, type=click.Path(exists=True))
@click.option("--include", default="/usr/local/cuda/include", type=click.Path(exists=True))
@click.option("--width", default=8, show_default=True, help="Rows of a call.")
@click.option("--libraries", type=click.Path(exists=True), hidden=True)
def main(bundle: str, wheel: str, include: str, width: int, libraries: str | None) -> None:
    if libraries is not None:
        sys.exit(0 if watched(bundle, wheel, width) else 1)
    provider = Path(wheel) / "onnxruntime" / "capi" / "libonnxruntime_providers_cuda.so"
    with tempfile.TemporaryDirectory() as folder:
        build(provider.resolve(), Path(include), Path(folder))
        again = [sys.executable, *sys.argv, "--libraries", folder]
        done = subprocess.run(again, env={**os.environ, "LD_LIBRARY_PATH": folder})
    sys.exit(done.returncode)


if __name__ == "__main__":
    main()
