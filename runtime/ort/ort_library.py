"""Import of ONNX Runtime, with an error that names the package to install."""

from __future__ import annotations

from typing import Any

from eagle3.runtime.errors import EngineMissing


def import_onnxruntime() -> Any:
    """Return the module `onnxruntime`.

    Raises EngineMissing, with the extra to install, if it cannot be imported.
    """
    try:
        import onnxruntime
    except ImportError as error:
        raise EngineMissing(
            "no engine package is installed: run pip install 'eagle3[cpu]' (or 'eagle3[gpu]' on an "
            f"NVIDIA machine) ({error})"
        ) from error
    return onnxruntime
