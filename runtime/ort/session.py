"""An ONNX Runtime session over buffers that are allocated once.

Who owns what: a `Buffer` owns its memory for the life of the engine; a call sees views of its
front. Past and present of a cache are the same OrtValue, so an engine writes it in place.
`load_session` compares a graph with its manifest and with what its caller will bind, so that a
foreign one is refused before anything is allocated for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping
from pathlib import Path
from typing import Any

from eagle3.runtime.bundle.folder import Bundle
from eagle3.runtime.errors import BundleError, EngineError
from eagle3.runtime.ort.ort_library import import_onnxruntime
from eagle3.runtime.ort.signature import Bound, check_tensors, tensor_spec
from eagle3.runtime.stats import Clock

OrtValues = tuple[Mapping[str, Any], Mapping[str, Any]]  # OrtValues by name: inputs, outputs

_MAX_BINDINGS = 256
_BACKEND = "ort-cpu"


class Session:
    """One compiled graph. Calls of equal shapes reuse one of the newest bindings."""

    def __init__(self, path: Path, name: str, threads: int, clock: Clock) -> None:
        ort = import_onnxruntime()
        options = ort.SessionOptions()
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        options.log_severity_level = 4  # failures come back as exceptions
        # Two sessions take turns: a pool that spins after its run would take the other's core.
        options.add_session_config_entry("session.force_spinning_stop", "1")
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
        """Runs once over OrtValues, by name: `values()` gives (inputs, outputs).

        `key` names the shapes of the call: it is bound once, and with a key seen before the same
        memory is read and written again. Raises EngineError when ONNX Runtime fails.
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
        """Keeps the binding; the oldest one goes when there are too many."""
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
    """Loads engine `name` of a bundle.

    Raises BundleError when it was built for another backend, cannot be loaded, or when its inputs
    and outputs are not those of its manifest and of `bound`.
    """
    _refuse_other_backend(bundle)
    path = bundle.path(bundle.manifest.engines[name].file)
    session = Session(path, name, threads, clock)
    check_tensors(bundle, name, session, bound, more_outputs=True)
    return session


def _refuse_other_backend(bundle: Bundle) -> None:
    plan = bundle.manifest.plan
    if plan.backend != _BACKEND:
        raise BundleError(
            f"{bundle.root} was built for backend {plan.backend} in {plan.dtype}, here runs"
            f" {_BACKEND}: load it with device 'cuda' (--device cuda), or export it again with"
            f" --backend {_BACKEND} --dtype float32"
        )
