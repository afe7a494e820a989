"""What the stand-in's plan files compute: the bundle's own ONNX files, run by ONNX Runtime."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray
from stand_in_tensorrt import Program, Tensor

from eagle3.runtime.bundle import Bundle
from eagle3.runtime.gpu.buffers import bound_draft_tree
from eagle3.runtime.gpu.halves import DRAFT_TREE, TARGET
from eagle3.runtime.gpu.tensorrt_engine import PlanFile
from eagle3.runtime.manifest import TensorSpec
from eagle3.runtime.session import Bound
from eagle3.runtime.target import bound_target
from eagle3.runtime.tree import DynamicTree

Arrays = Mapping[str, NDArray[Any]]


def session(path: Path) -> Any:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def run_onnx(own: Any, inputs: Arrays, outputs: Arrays) -> None:
    """Runs over the arrays' own memory."""
    binding = own.io_binding()
    for name, array in inputs.items():
        assert array.flags.c_contiguous
        binding.bind_input(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)
    for name, array in outputs.items():
        binding.bind_output(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)
    own.run_with_iobinding(binding)


def tensors(specs: Sequence[TensorSpec]) -> list[Tensor]:
    return [Tensor(spec.name, spec.dtype, spec.shape) for spec in specs]


def aliases(outputs: Sequence[Tensor]) -> dict[str, str]:
    names = [t.name for t in outputs if t.name.startswith("present_")]
    return {name: name.replace("present_", "past_") for name in names}


class OnnxProgram:
    """An engine of the bundle; widths: N of the calls so far."""

    def __init__(self, bundle: Bundle, name: str, bound: Bound) -> None:
        self.inputs, self.outputs = tensors([*bound.inputs]), tensors([*bound.outputs])
        self.aliases = aliases(self.outputs)
        self._session = session(bundle.path(bundle.manifest.engines[name].file))
        self._rows = next(t.name for t in self.inputs if "N" in t.shape)
        self.widths: list[int] = []

    def run(self, arrays: Arrays) -> None:
        self.widths.append(arrays[self._rows].shape[1])
        inputs, outputs = ({t.name: arrays[t.name] for t in x} for x in (self.inputs, self.outputs))
        run_onnx(self._session, inputs, outputs)


class DraftTreeProgram:
    """The contract of `draft_tree` in numpy, a call of the head's engines for each depth."""

    def __init__(self, bundle: Bundle) -> None:
        manifest = bundle.manifest
        info = manifest.draft
        assert info is not None
        self._tree, self._hidden_size = manifest.plan.tree, info.hidden_size
        self._num_nodes = self._tree.num_draft_tokens + 1
        self._draft_vocab_size = info.draft_vocab_size
        bound = bound_draft_tree(manifest, info, self._num_nodes)
        self.inputs, self.outputs = tensors([*bound.inputs]), tensors([*bound.outputs])
        self.aliases = aliases(self.outputs)
        has_fuse = "draft_fuse" in manifest.engines
        self._fuse = session(bundle.path("draft_fuse.onnx")) if has_fuse else None
        self._draft = session(bundle.path("draft.onnx"))
        self.rows: list[int] = []  # in use, of the calls so far

    def run(self, arrays: Arrays) -> None:
        count, past = int(arrays["num_rows"][0]), int(arrays["past_len"][0])
        assert 1 <= count <= arrays["next_ids"].shape[1]
        self.rows.append(count)
        hidden = np.ascontiguousarray(arrays["features"][:, :count])
        if self._fuse is not None:
            (hidden,) = self._fuse.run(["hidden"], {"features": hidden})
        ids = arrays["next_ids"][0, :count]
        causal = np.tril(np.ones((count, count), np.bool_))
        positions = np.arange(past, past + count)
        last = np.array([count - 1])
        step = (ids, positions, hidden, causal, past, last)
        out_ids, log_probs, hidden = self._step(arrays, *step)
        plan = self._tree
        tree = DynamicTree(int(ids[-1]), self._top_k, plan.depth_in_use, plan.num_draft_tokens)
        tree.add_root_candidates(out_ids[0], log_probs[0])
        hidden, total = hidden[:, -1:], past + count
        while (frontier := tree.frontier) is not None:
            num, window = frontier.row_mask.shape
            fed = np.ascontiguousarray(hidden[:, frontier.parent_slots])
            where = np.full(num, total - 1 + frontier.depth)
            behind = total + window - num
            step = (frontier.tokens, where, fed, frontier.row_mask, behind, np.arange(num))
            out_ids, log_probs, hidden = self._step(arrays, *step)
            tree.add(out_ids, log_probs)
        grown = tree.finish()
        size = grown.num_nodes
        for name in ("tokens", "parents", "positions", "tree_mask"):
            arrays[name][:] = 0
        arrays["tokens"][0, :size], arrays["parents"][0, :size] = grown.tokens, grown.parents
        arrays["positions"][0] = total
        arrays["positions"][0, :size] += grown.depths
        arrays["tree_mask"][0] = np.eye(self._num_nodes, dtype=np.bool_)
        arrays["tree_mask"][0, :size, :size] = grown.ancestor_mask()
        arrays["num_nodes"][0] = size

    @property
    def _top_k(self) -> int:
        return min(self._tree.top_k_in_use, self._draft_vocab_size)

    def _step(
        self,
        arrays: Arrays,
        ids: NDArray[Any],
        positions: NDArray[Any],
        hidden: NDArray[Any],
        mask: NDArray[np.bool_],
        past: int,
        picked: NDArray[Any],
    ) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
        top_k = self._top_k
        inputs = {
            "input_ids": ids[None].astype(np.int64),
            "position_ids": positions[None].astype(np.int64),
            "hidden": hidden,
            "tree_mask": np.ascontiguousarray(mask[None]),
            "past_len": np.array([past], np.int64),
            "logit_rows": picked[None].astype(np.int64),
            "top_k": np.array([top_k], np.int64),
            **{name: arrays[name] for name in ("past_k.0", "past_v.0")},
        }
        shape = (1, len(picked), top_k)
        outputs = {
            "top_ids": np.empty(shape, np.int64),
            "top_log_probs": np.empty(shape, np.float32),
            "hidden_out": np.empty((1, len(ids), self._hidden_size), hidden.dtype),
            **{name: arrays[name] for name in ("present_k.0", "present_v.0")},
        }
        run_onnx(self._draft, inputs, outputs)
        return outputs["top_ids"][0], outputs["top_log_probs"][0], outputs["hidden_out"]


def programs_of(bundle: Bundle) -> dict[str, Program]:
    """The engines' own files; a bundle whose export left no `draft_tree` gets the one in numpy."""
    manifest = bundle.manifest
    found: dict[str, Program] = {TARGET: OnnxProgram(bundle, TARGET, bound_target(manifest))}
    if manifest.draft is not None and DRAFT_TREE in manifest.engines:
        bound = bound_draft_tree(manifest, manifest.draft, manifest.plan.tree.num_draft_tokens + 1)
        found[DRAFT_TREE] = OnnxProgram(bundle, DRAFT_TREE, bound)
    elif manifest.draft is not None:
        found[DRAFT_TREE] = DraftTreeProgram(bundle)
    return found


def ranges(tensor_list: Sequence[Tensor], rows: int, logit_rows: int) -> dict[str, Any]:
    """One profile: N 1 .. rows, M 1 .. logit_rows."""

    def shape(tensor: Tensor, sizes: Mapping[str, int]) -> list[int]:
        return [d if isinstance(d, int) else sizes[d] for d in tensor.shape]

    low, high = {"B": 1, "N": 1, "M": 1}, {"B": 1, "N": rows, "M": logit_rows}
    return {t.name: [shape(t, low), shape(t, high), shape(t, high)] for t in tensor_list}


def write_plan_files(
    bundle: Bundle, programs: Mapping[str, Program], folder: Path, **changes: Any
) -> dict[str, PlanFile]:
    """Plan files as the stand-in reads them: profile 0 for decode and verify, 1 for prefill."""
    plan = bundle.manifest.plan
    widest = plan.max_draft_tokens + 1
    files = {}
    for name, program in programs.items():
        profiles = [
            ranges(program.inputs, widest, widest),
            ranges(program.inputs, plan.prefill_chunk, 1),
        ]
        path = folder / f"{name}.plan"
        path.write_text(json.dumps({"program": name, "profiles": profiles}))
        fields: dict[str, Any] = {
            "path": path,
            "backend": "tensorrt",
            "library_version": "99.1",
            "compute_capability": "8.9",
            "rebuild": "eagle3 build BUNDLE",
        }
        files[name] = PlanFile(**{**fields, **changes})
    return files
