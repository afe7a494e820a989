"""One system under test, in the environment that it was installed into (`peers.py` starts it).

    python worker.py KIND MODEL THREADS

Reads one JSON object per line and answers with one. {"ids": [...], "new": N}: decode greedily,
without stopping; the answer has `ids`, `seconds` from the first new token to the last, `tokens`
between them, and `rss` in bytes. {"logits": [...]}: the answer has `file`, float32 [T,V], the
logits of a text, or `error`.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np


class LlamaCpp:
    """llama.cpp: a GGUF file."""

    def __init__(self, model: str, threads: int) -> None:
        from llama_cpp import Llama

        self.llm = Llama(
            model, n_ctx=2048, n_threads=threads, n_threads_batch=threads, verbose=False
        )
        self.model, self.threads = model, threads

    def decode(self, ids: list[int], count: int) -> tuple[list[int], list[float]]:
        self.llm.reset()
        found, times = [], []
        for token in self.llm.generate(ids, temp=0.0):
            found.append(int(token))
            times.append(time.perf_counter())
            if len(found) == count:
                return found, times
        return found, times

    def logits(self, ids: list[int]) -> Any:
        from llama_cpp import Llama

        llm = Llama(self.model, n_ctx=2048, n_threads=self.threads, logits_all=True, verbose=False)
        llm.eval(ids)
        return np.array(llm.scores[: len(ids)], np.float32)


class OpenVino:
    """OpenVINO GenAI: a GGUF file."""

    def __init__(self, model: str, threads: int) -> None:
        import openvino
        import openvino_genai

        self.openvino, self.genai = openvino, openvino_genai
        self.pipe = openvino_genai.LLMPipeline(model, "CPU", INFERENCE_NUM_THREADS=threads)

    def decode(self, ids: list[int], count: int) -> tuple[list[int], list[float]]:
        config = self.genai.GenerationConfig()
        config.max_new_tokens, config.do_sample, config.ignore_eos = count, False, True
        config.apply_chat_template = False
        inputs = self.openvino.Tensor(np.array([ids], np.int64))
        result = self.pipe.generate(self._tokenized(inputs, len(ids)), config)
        gaps = np.array(result.perf_metrics.get_tpot().mean) / 1e3
        found = [int(token) for token in result.tokens[0]]
        return found, [gaps * i for i in range(len(found))]

    def _tokenized(self, inputs: Any, count: int) -> Any:
        mask = self.openvino.Tensor(np.ones((1, count), np.int64))
        return self.genai.TokenizedInputs(inputs, mask)

    def logits(self, ids: list[int]) -> Any:
        raise NotImplementedError("its API returns no logits")


class OrtGenAi:
    """ONNX Runtime GenAI: a folder of its model builder."""

    def __init__(self, model: str, threads: int) -> None:
        import onnxruntime_genai

        self.og = onnxruntime_genai
        path = Path(model) / "genai_config.json"
        config = json.loads(path.read_text())
        config["model"]["decoder"]["session_options"]["intra_op_num_threads"] = threads
        path.write_text(json.dumps(config))
        self.model = onnxruntime_genai.Model(model)

    def _generator(self) -> Any:
        params = self.og.GeneratorParams(self.model)
        params.set_search_options(max_length=2048, do_sample=False, min_length=2047)
        return self.og.Generator(self.model, params)

    def decode(self, ids: list[int], count: int) -> tuple[list[int], list[float]]:
        generator = self._generator()
        generator.append_tokens(np.array([ids], np.int32))
        found, times = [], []
        while len(found) < count:
            generator.generate_next_token()
            found.append(int(generator.get_next_tokens()[0]))
            times.append(time.perf_counter())
        return found, times

    def logits(self, ids: list[int]) -> Any:
        rows, generator = [], self._generator()
        for token in ids:
            generator.append_tokens(np.array([[token]], np.int32))
            rows.append(np.array(generator.get_logits()).reshape(-1))
        return np.array(rows, np.float32)


class Transformers:
    """transformers in float32, without or with its prompt lookup."""

    lookup: int | None = None

    def __init__(self, model: str, threads: int) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(threads)
        self.torch, place = torch, Path(model)
        where = {"pretrained_model_name_or_path": str(place.parent), "gguf_file": place.name}
        self.model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32).eval()

    def decode(self, ids: list[int], count: int) -> tuple[list[int], list[float]]:
        times: list[float] = []
        streamer = type("Clock", (), {})()
        streamer.put = lambda value: times.extend([time.perf_counter()] * value.numel())
        streamer.end = lambda: None
        with self.torch.no_grad():
            out = self.model.generate(
                self.torch.tensor([ids]),
                attention_mask=self.torch.ones(1, len(ids), dtype=self.torch.int64),
                do_sample=False,
                max_new_tokens=count,
                min_new_tokens=count,
                pad_token_id=0,
                streamer=streamer,
                prompt_lookup_num_tokens=self.lookup,
            )
        return out[0, len(ids) :].tolist(), times[len(ids) :]

    def logits(self, ids: list[int]) -> Any:
        with self.torch.no_grad():
            return self.model(self.torch.tensor([ids]), use_cache=False).logits[0].numpy()


class PromptLookup(Transformers):
    lookup = 5


KINDS = {
    "llama.cpp": LlamaCpp,
    "openvino": OpenVino,
    "ort-genai": OrtGenAi,
    "transformers": Transformers,
    "transformers-lookup": PromptLookup,
}


def peak_rss() -> int:
    """Return the peak resident memory of this process in bytes.

    Not that of getrusage, which is at least what the parent had when it started the process.
    """
    status = Path("/proc/self/status").read_text()
    return 1024 * int(next(x for x in status.splitlines() if x.startswith("VmHWM")).split()[1])


def main() -> None:
    kind, model, threads = sys.argv[1:4]
    system = KINDS[kind](model, int(threads))
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        if "logits" in order:
            try:
                found = system.logits(order["logits"])
            except Exception as error:  # a row without these columns says why
                print(json.dumps({"error": f"{type(error).__name__}: {error}"}), flush=True)
                continue
            with tempfile.NamedTemporaryFile(suffix=".npy", delete=False) as file:
                np.save(file, found)
            print(json.dumps({"file": file.name}), flush=True)
            continue
        ids, times = system.decode(order["ids"], order["new"])
        seconds = times[-1] - times[0]
        answer = {"ids": ids, "tokens": len(ids) - 1, "rss": peak_rss(), "seconds": seconds}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
