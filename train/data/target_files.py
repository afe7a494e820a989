"""The parts of a target that the data stage uses: its tokenizer, its chat template and
its bundle.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tokenizers import Tokenizer
from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from eagle3.export.exporter import ExportRequest, export_bundle
from eagle3.export.targets.target import locate, why_not_loaded
from eagle3.export.targets.tokenizer_files import write_tokenizer
from eagle3.plans.plan import Plan
from eagle3.runtime.bundle.folder import MANIFEST_NAME, Bundle
from eagle3.runtime.errors import BundleError, DataError, ExportError
from eagle3.runtime.text.chat_template import ChatTemplate
from eagle3.runtime.text.tokenizer import load_tokenizer
from eagle3.train.data.render import Renderer

Report = Callable[[str], None]


@dataclass(frozen=True)
class TargetTexts:
    """A target without its weights.

    template: the chat template, or None if prompts are used as they are. renderer: renders
    conversations with it.
    """

    tokenizer: Tokenizer
    template: ChatTemplate | None
    renderer: Renderer
    vocab_size: int
    num_layers: int
    eos_token_ids: tuple[int, ...]


def read_target_texts(source: str, raw: bool) -> TargetTexts:
    """Read the configuration, tokenizer and chat template of a checkpoint, but no weights.

    source: checkpoint, given as for `eagle3 export --target`. raw: ignore the chat template. Raises
    ExportError if the checkpoint cannot be read, and DataError if it has no chat template and `raw`
    is False.
    """
    where = locate(source)
    try:
        config = AutoConfig.from_pretrained(**where)
        tokenizer = AutoTokenizer.from_pretrained(**where)
    except Exception as error:  # whatever transformers or the checkpoint raise
        raise ExportError(why_not_loaded(source, error)) from error
    text = config.get_text_config()
    model = SimpleNamespace(generation_config=_generation_config(where, config))
    described: Any = SimpleNamespace(
        tokenizer=tokenizer, model=model, config=text, vocab_size=int(text.vocab_size)
    )
    with tempfile.TemporaryDirectory() as name:
        info, _ = write_tokenizer(described, Path(name))
        loaded = load_tokenizer(name)
        path = info.chat_template and Path(name) / info.chat_template
        written = path.read_text(encoding="utf-8") if path else None
    if written is None and not raw:
        raise DataError(
            f"target {source} has no chat template: add --raw to use prompts as they are, or use "
            "another target"
        )
    template = None if raw or written is None else ChatTemplate(written, info.special_tokens)
    eos = info.eos_token_ids
    renderer = Renderer(
        loaded, template, described.vocab_size, eos, info.special_tokens.get("eos_token")
    )
    return TargetTexts(
        loaded, template, renderer, described.vocab_size, int(text.num_hidden_layers), eos
    )


def _generation_config(where: dict[str, Any], config: Any) -> Any:
    try:
        return GenerationConfig.from_pretrained(where["pretrained_model_name_or_path"])
    except OSError:  # the checkpoint has no generation_config.json
        return GenerationConfig.from_model_config(config)


def has_bundle(folder: Path, max_len: int) -> bool:
    """Return True if `folder` holds a bundle for a context of `max_len` tokens.

    Raises DataError if its manifest belongs to something that cannot be opened as a bundle.
    """
    if not (folder / MANIFEST_NAME).is_file():
        return False
    try:
        return Bundle.open(folder).manifest.plan.max_seq_len == max_len
    except BundleError as error:
        raise DataError(f"{folder} cannot be used ({error}): delete it and run again") from error


def plan_for(max_len: int, **fields: Any) -> Plan:
    """Return a plan with a context of `max_len` tokens, and buffers that are not larger than that.

    fields: other fields of the plan. Raises PlanError for a value out of range.
    """
    default = Plan()
    return Plan(
        max_seq_len=max_len,
        prefill_chunk=min(default.prefill_chunk, max_len),
        max_draft_tokens=min(default.max_draft_tokens, max_len - 1),
        **fields,
    )


def export_target(source: str, folder: Path, max_len: int, report: Report) -> None:
    """Export the target without a draft to `folder`, unless it holds such a bundle already.

    Raises ExportError if the target cannot be exported, and DataError if `folder` holds a damaged
    bundle.
    """
    if has_bundle(folder, max_len):
        return
    export_bundle(
        ExportRequest(
            target=source,
            drafts=(),
            output=folder,
            plan=plan_for(max_len),
            force=True,
            command="eagle3 train data",
        ),
        report,
    )
