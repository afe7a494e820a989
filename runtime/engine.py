"""The engine that a service embeds: loads a bundle, and generates or streams answers.

One request runs at a time. The round loop is in `rounds/decode.py`.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np
from numpy.typing import NDArray

from eagle3.plans.tree_plan import TreePlan, TreeRequest
from eagle3.runtime.acceptance.rules import AcceptanceRule, TokenLogprob
from eagle3.runtime.acceptance.sampling import TokenHistory
from eagle3.runtime.bundle.folder import Bundle
from eagle3.runtime.drafters.base import Drafter
from eagle3.runtime.drafters.registry import DRAFTERS, available, build
from eagle3.runtime.errors import PlanError, PromptTooLong, RequestError
from eagle3.runtime.ort.target_engine import TargetEngine
from eagle3.runtime.params import Acceptance, SamplingParams, checked_count, checked_threads
from eagle3.runtime.request import (
    Options,
    Request,
    checked_cancel,
    checked_logprobs,
    checked_stop,
)
from eagle3.runtime.request_lock import RequestLock
from eagle3.runtime.rounds.decode import Decoding, Round
from eagle3.runtime.rounds.endings import FinishReason, TokenSequence
from eagle3.runtime.rounds.host_rounds import HostRounds
from eagle3.runtime.rounds.pace import Pace, PlainCost
from eagle3.runtime.rounds.protocol import RoundEngine
from eagle3.runtime.stats import Clock, Stats, StatsRecorder
from eagle3.runtime.text.chat_template import ChatTemplate
from eagle3.runtime.text.prompt_encoding import Prompt, encode_prompt
from eagle3.runtime.text.text_stream import TextStream
from eagle3.runtime.text.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from eagle3.runtime.gpu.device import Device

DEFAULT_MAX_NEW_TOKENS = 256
DEVICE_BACKENDS = {"cpu": ("ort-cpu",), "cuda": ("ort-cuda", "tensorrt", "tensorrt-rtx")}
"""Device -> the backends that can run engines on it, the default first."""


@dataclass(frozen=True)
class Result:
    """A finished request. `token_ids` include the EOS token, `text` does not."""

    text: str
    token_ids: list[int]
    prompt_tokens: int
    finish_reason: FinishReason
    stats: Stats
    logprobs: list[TokenLogprob] | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the fields as a JSON object."""
        logprobs = None if self.logprobs is None else [vars(each) for each in self.logprobs]
        return {**vars(self), "stats": self.stats.to_json(), "logprobs": logprobs}


@dataclass(frozen=True)
class Chunk:
    """What one round added to the answer. Only the last chunk has a `result`."""

    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    logprobs: list[TokenLogprob] | None = None
    result: Result | None = None


class Engine:
    """A loaded bundle, created by `load`. Requests of several threads take turns.

    device: the bundle on a GPU, which then runs every round; None for ONNX Runtime on the CPU.
    """

    def __init__(self, bundle: Bundle, threads: int, device: Device | None = None) -> None:
        manifest = bundle.manifest
        self.bundle = bundle
        self.plan = manifest.plan
        self._threads = threads
        self._clock = Clock() if device is None else device.clock
        self._plain_cost = PlainCost()
        self.device = device
        self._target = None if device else TargetEngine(bundle, threads, self._clock)
        self._drafters: dict[str, Drafter] = {}
        self._history = TokenHistory(manifest.target.vocab_size)
        self.tokenizer = load_tokenizer(bundle)
        self.chat_template = _chat_template(bundle)
        self._turns = RequestLock()
        if device is None:
            self.drafter(self.default_drafter)

    @property
    def target(self) -> TargetEngine:
        """The target engine on the CPU. Raises RequestError if the bundle is on a GPU."""
        if self._target is None:
            raise RequestError(
                "single calls of the target are not supported on a GPU: load the bundle with"
                " device='cpu'; bench/gpu_check.py checks a bundle on a GPU"
            )
        return self._target

    @property
    def drafters(self) -> list[str]:
        """Names of the drafters that a request can select, the default first."""
        return available(self.bundle) if self.device is None else list(self.device.drafters)

    @property
    def default_drafter(self) -> str:
        return self.drafters[0]

    def generate(self, prompt: Prompt, **options: Unpack[Options]) -> Result:
        """Generate the whole answer. The options are those of `stream`."""
        result = None
        for chunk in self.stream(prompt, **options):
            result = chunk.result
        assert result is not None
        return result

    def stream(
        self,
        prompt: Prompt,
        *,
        max_new_tokens: int = DEFAULT_MAX_NEW_TOKENS,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        repetition_penalty: float = 1.0,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        logit_bias: Mapping[int, float] | None = None,
        seed: int = 0,
        acceptance: Acceptance = "rejection",
        stop: str | Sequence[str] | None = None,
        chat: bool = True,
        drafter: str | None = None,
        draft_top_k: int | None = None,
        draft_depth: int | None = None,
        num_draft_tokens: int | None = None,
        tree: TreeRequest | None = None,
        logprobs: int | bool | None = None,
        cancel: threading.Event | None = None,
    ) -> Iterator[Chunk]:
        """Yield what each round commits. Closing the iterator cancels the request.

        A stream holds the engine until it is read to its end or closed; requests of other threads
        wait.

        prompt: a string (the user's message if chat=True, the raw text if chat=False), a list of
        chat messages, or token ids. drafter: one of `drafters`, or None for the first; "none" is
        plain decoding. tree: "dynamic", the name of a static tree, or its paths as lists of child
        ranks, cut to the draft sizes. Passing a drafter, a tree or a draft size also disables the
        fallback to plain decoding. acceptance: "rejection" or "coupled" (the same seed gives the
        same text with any drafter). logprobs: number of alternatives per token. cancel: an event
        that ends the request after the round in progress.

        Raises RequestError (PromptTooLong, ...) before anything runs, and EngineError if an
        engine fails.
        """
        params = SamplingParams(
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            presence_penalty=presence_penalty,
            frequency_penalty=frequency_penalty,
            logit_bias={} if logit_bias is None else logit_bias,
            seed=seed,
            acceptance=acceptance,
        )
        params.validate_for_vocab(self.bundle.manifest.target.vocab_size)
        shape = {
            "draft_top_k": draft_top_k,
            "draft_depth": draft_depth,
            "num_draft_tokens": num_draft_tokens,
            "tree": tree,
        }
        explicit = drafter is not None or any(each is not None for each in shape.values())
        name = self._checked_drafter(drafter)
        request = Request(
            prompt_ids=self.encode(prompt, chat=chat),
            params=params,
            max_new_tokens=checked_count("max_new_tokens", max_new_tokens),
            stop=checked_stop(stop),
            drafter=name,
            tree=self._tree(name, shape),
            may_fall_back=not explicit,
            num_logprobs=checked_logprobs(logprobs),
            cancel=checked_cancel(cancel),
        )
        TextStream(
            self.tokenizer, request.stop
        )  # raises RequestError for invalid stop strings before anything runs
        return self._run(request)

    def encode(self, prompt: Prompt, *, chat: bool = True) -> list[int]:
        """Return the token ids of a prompt. Raises PromptTooLong and RequestError."""
        if not isinstance(chat, bool):
            raise RequestError(f"chat must be True or False, got {chat!r}")
        vocab_size = self.bundle.manifest.target.vocab_size
        ids = encode_prompt(prompt, self.tokenizer, self.chat_template, chat, vocab_size)
        if len(ids) > self.plan.max_seq_len:
            raise PromptTooLong(
                f"the prompt has {len(ids)} tokens, the bundle's context is {self.plan.max_seq_len}"
                "; shorten it, or export with a larger --max-seq-len"
            )
        return ids

    def render(self, prompt: Prompt) -> str:
        """Return the prompt as text after the chat template, as the target reads it."""
        ids = self.encode(prompt)
        return str(self.tokenizer.decode(ids, skip_special_tokens=False))

    def next_logits(self, ids: Sequence[int]) -> NDArray[np.float32]:
        """Return the target's logits, float32 [V], for the token after `ids` (at least one id)."""
        rule = AcceptanceRule(SamplingParams(temperature=1.0), self._history, None)
        rounds = self._rounds("none", rule)
        with self.turn():
            rounds.start(np.asarray(ids, np.int64))
            for start in range(0, len(ids), rounds.prefill_chunk):
                rounds.prefill(start)
            return rounds.last_logits()

    def _run(self, request: Request) -> Iterator[Chunk]:
        with self.turn() as turn:
            for chunk in self._chunks(request):
                yield chunk
                turn.resume()

    def _chunks(self, request: Request) -> Iterator[Chunk]:
        prompt = np.asarray(request.prompt_ids, np.int64)
        decoding = self._decoding(request)
        texts: list[str] = []
        logprobs: list[TokenLogprob] | None = None if request.num_logprobs is None else []
        for each in decoding.rounds(prompt):
            texts.append(each.committed.text)
            if logprobs is not None:
                logprobs.extend(each.logprobs or ())
            if each.committed.finish_reason is None:
                yield _chunk(each, None)
        reason = decoding.sequence.finish_reason
        assert reason is not None
        result = Result(
            text="".join(texts),
            token_ids=decoding.sequence.token_ids,
            prompt_tokens=len(prompt),
            finish_reason=reason,
            stats=decoding.stats.result(),
            logprobs=logprobs,
        )
        yield _chunk(each, result) if texts else Chunk("", [], reason, logprobs, result)

    def _decoding(self, request: Request) -> Decoding:
        limit = min(request.max_new_tokens, self.plan.max_seq_len - len(request.prompt_ids))
        eos = self.bundle.manifest.generation.eos_token_ids
        rule = AcceptanceRule(request.params, self._history, request.num_logprobs)
        return Decoding(
            engine=self._rounds(request.drafter, rule),
            sequence=TokenSequence(limit, eos, TextStream(self.tokenizer, request.stop)),
            history=self._history,
            tree=request.tree,
            pace=Pace(request.may_fall_back, rule.token_exact, self._plain_cost),
            clock=self._clock,
            cancel=request.cancel,
            stats=StatsRecorder(request.drafter),
        )

    def _rounds(self, drafter: str, rule: AcceptanceRule) -> RoundEngine:
        if self.device is None:
            return HostRounds(self.target, self.drafter(drafter), rule)
        from eagle3.runtime.gpu.device_rounds import DeviceRounds

        return DeviceRounds(self.device, rule, drafts=drafter != "none")

    def turn(self) -> RequestLock:
        """Return a context manager that gives this thread exclusive use of the engines."""
        return self._turns

    def drafter(self, name: str) -> Drafter:
        """Return drafter `name`, one of `drafters`. It is loaded on first use."""
        if name not in self._drafters:
            self._drafters[name] = build(name, self.bundle, self._threads, self._clock)
        return self._drafters[name]

    def default_tree(self, drafter: str) -> TreePlan:
        """Return the default tree of a drafter: the draft's own, or the plan's."""
        info = self.bundle.manifest.drafts.get(drafter)
        return self.plan.tree if info is None else info.tree

    def _checked_drafter(self, name: str | None) -> str:
        if name is None:
            return self.default_drafter
        if name not in self.drafters:
            if self.device is not None and name in available(self.bundle):
                raise RequestError(
                    f"drafter '{name}' is not supported on a GPU, which runs one head with an"
                    f" engine draft_tree; available here: {', '.join(self.drafters)}; device 'cpu'"
                    " runs all drafters"
                )
            known = isinstance(name, str) and name in DRAFTERS
            raise RequestError(
                f"drafter '{name}' is {'not in this bundle' if known else 'unknown'}; "
                f"this bundle has: {', '.join(self.drafters)}"
            )
        return name

    def _tree(self, drafter: str, shape: Mapping[str, Any]) -> TreePlan:
        plan = replace(self.plan, tree=self.default_tree(drafter))
        try:
            tree = plan.override(**shape)
            if self.device is not None and drafter != "none":
                self.device.check_tree(tree)
            return tree
        except PlanError as error:
            raise RequestError(str(error)) from error


def load(
    path: str | os.PathLike[str],
    *,
    threads: int | None = None,
    device: str = "cpu",
    backend: str | None = None,
) -> Engine:
    """Open the bundle folder at `path` and load its engines.

    threads: CPU threads of each engine; None for all cores available to the process. device: "cpu"
    or "cuda". backend: one of `DEVICE_BACKENDS[device]`; None for the one that the bundle was
    planned or built for.

    Raises BundleError, EngineMissing, DeviceError, PlanError and RequestError.
    """
    if device not in DEVICE_BACKENDS:
        raise RequestError(
            f"device '{device}' is not supported: use one of {', '.join(DEVICE_BACKENDS)}"
        )
    if backend is not None and backend not in DEVICE_BACKENDS[device]:
        raise RequestError(
            f"backend '{backend}' does not run on device {device}: use one of"
            f" {', '.join(DEVICE_BACKENDS[device])}"
        )
    bundle, threads = Bundle.open(path), checked_threads(threads)
    if device == "cpu":
        return Engine(bundle, threads)
    from eagle3.runtime.gpu.load import load_device

    return Engine(bundle, threads, load_device(bundle, backend))


def _chat_template(bundle: Bundle) -> ChatTemplate | None:
    source = bundle.chat_template()
    if source is None:
        return None
    return ChatTemplate(source, bundle.manifest.tokenizer.special_tokens)


def _chunk(each: Round, result: Result | None) -> Chunk:
    logprobs = None if each.logprobs is None else list(each.logprobs)
    done = each.committed
    return Chunk(done.text, list(done.token_ids), done.finish_reason, logprobs, result)
