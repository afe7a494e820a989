"""The runtime alone: what it imports, and that it works without torch and transformers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import eagle3
from eagle3.runtime.bundle.folder import Bundle

HEAVY = ("torch", "transformers", "onnx", "onnx_ir", "onnxscript", "safetensors", "scipy")
VENV = os.environ.get("EAGLE3_RUNTIME_VENV")


def python(code: str, *arguments: object, executable: str | Path = sys.executable) -> Any:
    """What `code` prints as JSON, run in a process of its own away from the checkout."""
    done = subprocess.run(
        [executable, "-W", "error", "-c", code, *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd="/",
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


LOADED = "import json, sys; print(json.dumps(sorted(sys.modules)))"


def loaded_by(statement: str) -> set[str]:
    """Modules that importing loads."""
    return set(python(f"{statement}\n{LOADED}"))


def test_importing_eagle3_loads_nothing_heavy() -> None:
    loaded = loaded_by("import eagle3; eagle3.__version__")
    assert not loaded & {"numpy", "onnxruntime", "tokenizers", "jinja2", "click", *HEAVY}
    assert "eagle3.runtime.engine" not in loaded


def test_importing_the_runtime_loads_no_exporter() -> None:
    loaded = loaded_by(
        "import eagle3.runtime.engine\n"
        "import eagle3.runtime.ort.draft_engine, eagle3.runtime.ort.batch_engine\n"
        "import eagle3.runtime.drafters.eagle, eagle3.runtime.drafters.model"
    )
    assert {"numpy", "tokenizers", "eagle3.runtime.rounds.decode"} <= loaded
    assert not loaded & set(HEAVY)
    assert not {name for name in loaded if name.startswith(("eagle3.export", "eagle3.train"))}
    assert "onnxruntime" not in loaded, "an engine package is needed to load, not to import"


def test_importing_the_gpu_runtime_loads_no_gpu_library() -> None:
    loaded = loaded_by("import eagle3.runtime.gpu.load")
    assert not loaded & {"cuda", "tensorrt", "tensorrt_rtx", "onnxruntime", *HEAVY}


GENERATE = """
import json, sys
blocked = sys.argv[2].split(",")
for name in blocked:
    sys.modules[name] = None  # importing it raises ImportError
import eagle3
engine = eagle3.load(sys.argv[1], threads=1)
result = engine.generate("t5 t6 t7", max_new_tokens=20, temperature=1.0, acceptance="coupled")
print(json.dumps(result.to_json()))
"""


def test_it_generates_where_torch_cannot_be_imported(bundle: Bundle, engine: eagle3.Engine) -> None:
    """Blocked by name in a process of its own: imports inside functions are caught too."""
    found = python(GENERATE, bundle.root, ",".join([*HEAVY, "eagle3.export"]))
    expected = engine.generate("t5 t6 t7", max_new_tokens=20, temperature=1.0, acceptance="coupled")
    assert found["token_ids"] == expected.token_ids and found["text"] == expected.text


@pytest.mark.skipif(VENV is None, reason="EAGLE3_RUNTIME_VENV names no environment (make test)")
def test_it_generates_in_an_environment_of_its_own(bundle: Bundle, engine: eagle3.Engine) -> None:
    """A venv with the runtime's dependencies and nothing else."""
    assert VENV is not None
    executable = Path(VENV) / "bin" / "python"
    code = "import importlib.util as u, json, sys; print(json.dumps([n for n in sys.argv[1:] if u.find_spec(n)]))"  # noqa: E501
    assert python(code, *HEAVY, executable=executable) == [], "this environment proves nothing"
    found = python(GENERATE, bundle.root, "eagle3.export", executable=executable)
    expected = engine.generate("t5 t6 t7", max_new_tokens=20, temperature=1.0, acceptance="coupled")
    assert found["token_ids"] == expected.token_ids


WITHOUT_ENGINE = """
import json, sys
sys.modules["onnxruntime"] = None
import eagle3
from eagle3.runtime.errors import EngineMissing
try:
    eagle3.load(sys.argv[1])
except EngineMissing as error:
    print(json.dumps(str(error)))
"""


def test_without_an_engine_package_the_error_names_the_extra(bundle: Bundle) -> None:
    message = python(WITHOUT_ENGINE, bundle.root)
    assert "eagle3[cpu]" in message and "eagle3[gpu]" in message
    assert "\n" not in message
