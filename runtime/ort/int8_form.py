"""Which form of integer products this CPU computes exactly.

int8 targets multiply uint8 activations by int8 weights. x86 CPUs without VNNI instructions add such
products in pairs that saturate at 16 bits, without an error. There, ONNX Runtime can convert the
weights to uint8 when it loads them, which is exact at nearly the same speed. A probe decides:
one product of extreme values, compared with its exact sum.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from functools import cache

import numpy as np

from eagle3.runtime.errors import EngineError
from eagle3.runtime.ort.ort_library import import_onnxruntime

FORMS: Mapping[str, Mapping[str, str]] = {
    "int8": {},
    "uint8": {"session.x64quantprecision": "1"},
}
"""Form of the weights in memory -> the session's configuration entries that select it."""

_DEPTH, _WEIGHT, _ZERO_POINT = 64, 127, 128
# MatMulIntegerToFloat of rows [N,64] uint8 with zero point 128 and a weight [64,64] of 127.
_PROBE = base64.b64decode(
    "CAo69gEKNQoFc2hhcGUSBndlaWdodCIPQ29uc3RhbnRPZlNoYXBlKhMKBXZhbHVlKgcIARADSgF/oAEECkkKBHJvd3"
    "MKBndlaWdodAoDb25lCgNvbmUKBHplcm8SBHN1bXMiFE1hdE11bEludGVnZXJUb0Zsb2F0Og1jb20ubWljcm9zb2Z0"
    "EgVwcm9iZSodCAIQB0IFc2hhcGVKEEAAAAAAAAAAQAAAAAAAAAAqDRABQgNvbmVKBAAAgD8qCxACQgR6ZXJvSgGAWh"
    "cKBHJvd3MSDwoNCAISCQoDEgFOCgIIQGIXCgRzdW1zEg8KDQgBEgkKAxIBTgoCCEBCBAoAEBVCEQoNY29tLm1pY3Jv"
    "c29mdBAB"
)


@cache
def int8_form() -> str:
    """Return the form that integer products are exact in: "int8" if possible, otherwise "uint8".

    Raises EngineError if neither is exact, and EngineMissing if ONNX Runtime is not installed.
    """
    for form in FORMS:
        if is_exact(form):
            return form
    raise EngineError(
        "ONNX Runtime's integer products are not exact on this CPU, so int8 target weights cannot"
        " be used here: export the target with --weights same"
    )


def is_exact(form: str) -> bool:
    """Return whether this CPU computes a product of extreme values exactly in a form of FORMS."""
    ort = import_onnxruntime()
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    for key, value in FORMS[form].items():
        options.add_session_config_entry(key, value)
    session = ort.InferenceSession(_PROBE, options, providers=["CPUExecutionProvider"])
    # Each row has other numbers of terms: kernels differ by the number of rows.
    extremes = np.array([255, 0, 254, 1, 255, 0, 255, 128], np.uint8)
    rows = np.repeat(extremes[:, None], _DEPTH, axis=1)
    exact = (rows.astype(np.int64) - _ZERO_POINT).sum(1) * _WEIGHT
    return all(
        np.array_equal(session.run(None, {"rows": part})[0], sums[:, None] * np.ones(_DEPTH))
        for part, sums in ((rows[:1], exact[:1]), (rows, exact))
    )
