"""The probe that finds in which form integer products are exact."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, numpy_helper

from eagle3.runtime.bundle.describe import int8_text
from eagle3.runtime.errors import EngineError
from eagle3.runtime.ort import int8_form as module


def test_the_probe_is_a_product_of_extreme_values() -> None:
    model = onnx.load_from_string(module._PROBE)
    onnx.checker.check_model(model)
    fill, product = model.graph.node
    assert (fill.op_type, product.op_type) == ("ConstantOfShape", "MatMulIntegerToFloat")
    assert numpy_helper.to_array(fill.attribute[0].t) == np.array([module._WEIGHT], np.int8)
    constants = {each.name: numpy_helper.to_array(each) for each in model.graph.initializer}
    assert constants["shape"].tolist() == [module._DEPTH] * 2
    assert constants["zero"] == module._ZERO_POINT and constants["one"] == 1
    assert model.graph.input[0].type.tensor_type.elem_type == TensorProto.UINT8


def test_one_form_is_exact_here() -> None:
    assert module.is_exact(module.int8_form())
    assert module.is_exact("uint8"), "weights in uint8 are exact on every CPU"


@pytest.mark.parametrize(
    ("exact", "expected"),
    [({"int8", "uint8"}, "int8"), ({"uint8"}, "uint8")],
)
def test_int8_is_preferred(monkeypatch: pytest.MonkeyPatch, exact: set[str], expected: str) -> None:
    monkeypatch.setattr(module, "is_exact", exact.__contains__)
    assert module.int8_form.__wrapped__() == expected
    assert ("uint8" in int8_text(expected)) == (expected == "uint8")


def test_a_cpu_without_exact_products_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "is_exact", lambda form: False)
    with pytest.raises(EngineError, match="not exact on this CPU.*--weights same"):
        module.int8_form.__wrapped__()
