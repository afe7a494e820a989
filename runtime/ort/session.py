"""ONNX Runtime sessions that run on preallocated buffers (`kv_cache.py`).

`load_session` compares a graph with its manifest and with the tensors that the caller will bind. A
graph that does not match is rejected before anything is allocated for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from eagle3.runtime.bundle.folder import Bundle
from eagle3.runtime.errors import BundleError, EngineError
from eagle3.runtime.ort.int8_form import FORMS, int8_form
from eagle3.runtime.ort.ort_library import import_onnxruntime
from eagle3.runtime.ort.signature import Bound, check_tensors, tensor_spec
from eagle3.runtime.stats import Clock

OrtValues = tuple[Mapping[str, Any], Mapping[str, Any]]  # inputs and outputs, OrtValues by name

_MAX_BINDINGS = 256
_BACKEND = "ort-cpu"


class Session:
    """One loaded graph. Calls of the same shapes reuse one of the newest bindings.

    entries: configuration entries of the session.
    """

    def __init__(
        self,
        path: Path,
        name: str,
        threads: int,
        clock: Clock,
        entries: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        ort = import_onnxruntime()
        options = ort.SessionOptions()
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        options.log_severity_level = 4  # failures are raised as exceptions
        # Sessions run in turns: a thread pool that still spins after its run would take cores from
        # the next session.
        options.add_session_config_entry("session.force_spinning_stop", "1")
        for key, value in entries.items():
            options.add_session_config_entry(key, value)
        try:
            self._session = ort.InferenceSession(
                str(path), options, providers=["CPUExecutionProvider"]
            )
        except Exception as error:
            raise BundleError(f"engine '{name}' ({path}) cannot be loaded: {error}") from error
        self.name = name
        self.inputs = tuple(map(tensor_spec, self._session.get_inputs()))
        self.outputs = tuple(map(tensor_spec, self._session.get_outputs()))
        self._clock = clock
        self._bindings: dict[Hashable, Any] = {}

    def run(self, key: Hashable, values: Callable[[], OrtValues]) -> None:
        """Run the graph once.

        key: identifies the shapes of the call. They are bound on the first call with a key; later
        calls with that key read and write the same memory again.
        values: returns the inputs and outputs as OrtValues by name. It is called only to bind.
        Raises EngineError if ONNX Runtime fails.
        """
        try:
            binding = self._bindings.get(key)
            if binding is None:
                binding = self._remember(key, self._bind(*values()))
            start = time.perf_counter_ns()
            self._session.run_with_iobinding(binding)
        except Exception as error:
            raise EngineError(f"engine '{self.name}' failed: {error}") from error
        self._clock.engine_ns += time.perf_counter_ns() - start
        self._clock.calls[self.name] = self._clock.calls.get(self.name, 0) + 1

    def _remember(self, key: Hashable, binding: Any) -> Any:
        """Store the binding, and drop the oldest one if there are too many."""
        while len(self._bindings) >= _MAX_BINDINGS:
            del self._bindings[next(iter(self._bindings))]
        self._bindings[key] = binding
        return binding

    def _bind(self, inputs: Mapping[str, Any], outputs: Mapping[str, Any]) -> Any:
        binding = self._session.io_binding()
        for name, value in inputs.items():
            binding.bind_ortvalue_input(name, value)
        for name, value in outputs.items():
            binding.bind_ortvalue_output(name, value)
        return binding


def load_session(bundle: Bundle, name: str, bound: Bound, threads: int, clock: Clock) -> Session:
    """Load engine `name` of a bundle.

    Raises BundleError if the engine was built for another backend, if it cannot be loaded, or if
    its inputs and outputs do not match its manifest and `bound`.
    """
    _refuse_other_backend(bundle)
    path = bundle.path(bundle.manifest.engines[name].file)
    is_int8 = name == "target" and bundle.manifest.plan.target_weights == "int8"
    session = Session(path, name, threads, clock, FORMS[int8_form()] if is_int8 else {})
    check_tensors(bundle, name, session, bound, more_outputs=True)
    return session


def _refuse_other_backend(bundle: Bundle) -> None:
    plan = bundle.manifest.plan
    if plan.backend != _BACKEND:
        raise BundleError(
            f"{bundle.root} was built for backend {plan.backend} in {plan.dtype}, but device 'cpu'"
            f" needs backend {_BACKEND}: load it with device 'cuda' (--device cuda), or export it"
            f" again with --backend {_BACKEND} --dtype float32"
        )
