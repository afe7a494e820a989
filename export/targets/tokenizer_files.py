"""Writes the tokenizer files of a bundle: tokenizer.json, chat template, special tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from eagle3.export.targets.target import Target
from eagle3.runtime.bundle.manifest import GenerationDefaults, TokenizerInfo
from eagle3.runtime.errors import ExportError

_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def write_tokenizer(target: Target, folder: Path) -> tuple[TokenizerInfo, GenerationDefaults]:
    """Write the files into `folder`. Raises ExportError for a tokenizer without a fast version."""
    backend = getattr(target.tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ExportError(
            f"{type(target.tokenizer).__name__} has no tokenizer.json form, which the runtime needs"
        )
    backend.save(str(folder / "tokenizer.json"))
    template = _chat_template(target.tokenizer)
    if template is not None:
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    eos = eos_token_ids(target)
    info = TokenizerInfo(
        file="tokenizer.json",
        chat_template="chat_template.jinja" if template is not None else None,
        eos_token_ids=eos,
        bos_token_id=target.tokenizer.bos_token_id,
        special_tokens=_special_tokens(target.tokenizer),
    )
    return info, GenerationDefaults(eos_token_ids=eos, **_sampling(target))


def _chat_template(tokenizer: Any) -> str | None:
    template = getattr(tokenizer, "chat_template", None)
    if isinstance(template, dict):  # several named templates; "default" is the one for plain chat
        template = template.get("default")
    return template


def _special_tokens(tokenizer: Any) -> dict[str, str]:
    return {
        name: str(token)
        for name, token in tokenizer.special_tokens_map.items()
        if isinstance(token, str) or hasattr(token, "content")
    }


def eos_token_ids(target: Target) -> tuple[int, ...]:
    """Return all ids that end a text: from the generation config or the model, and the
    tokenizer.
    """
    sources = (target.model.generation_config, target.config, target.tokenizer)
    ids: set[int] = set()
    for source in sources:
        value = getattr(source, "eos_token_id", None)
        ids.update([] if value is None else value if isinstance(value, (list, tuple)) else [value])
    return tuple(sorted(i for i in ids if 0 <= i < target.vocab_size))


def _sampling(target: Target) -> dict[str, Any]:
    config = target.model.generation_config
    if not getattr(config, "do_sample", False):
        return {}
    return {name: getattr(config, name, None) for name in _SAMPLING}
