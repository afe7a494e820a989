"""Imports ONNX Runtime, or says which package to install."""

from __future__ import annotations

from typing import Any

from eagle3.runtime.errors import EngineMissing


def import_onnxruntime() -> Any:
    """The module `onnxruntime`, or EngineMissing that says which extra to install."""
    try:
        import onnxruntime
    except ImportError as error:
        raise EngineMissing(
            "no engine package is installed: pip install 'eagle3[cpu]' (or 'eagle3[gpu]' on an "
            f"NVIDIA machine) ({error})"
        ) from error
    return onnxruntime
