"""A tiny target that can talk: its chat template marks turns, as real ones do."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
from once import made_once

from eagle3.train.data.target_files import TargetTexts, export_target, read_target_texts
from eagle3.train.requests.data_request import DataRequest

# t1 ends a turn, as it ends a text; t4 is the assistant.
TALK = (
    "{% for m in messages %}"
    "{{ {'system': 't2', 'user': 't3', 'assistant': 't4'}[m['role']] }} {{ m['content'] }} t1 "
    "{% endfor %}{% if add_generation_prompt %}t4 {% endif %}"
)
MAX_LEN = 96


@pytest.fixture(scope="session")
def talker(llama: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`llama` with that template."""
    tokenizer = tiny.tiny_tokenizer(64, chat_template=TALK)
    return tiny.save_target(tmp_path_factory.mktemp("talker"), llama, tokenizer)


@pytest.fixture(scope="session")
def texts(talker: Path) -> TargetTexts:
    return read_target_texts(str(talker), raw=False)


@pytest.fixture(scope="session")
def talker_bundle(talker: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a run exports into its folder."""

    def export(output: Path) -> None:
        export_target(str(talker), output, MAX_LEN, lambda _: None)

    return made_once(tmp_path_factory, "talker", export)


Asked = Callable[..., DataRequest]


@pytest.fixture
def asked(talker: Path, talker_bundle: Path, tmp_path: Path) -> Asked:
    """Makes a request for prompts of `tmp_path`; the target is exported already."""

    def ask(name: str = "out", **options: Any) -> DataRequest:
        folder = tmp_path / name
        if not folder.exists():
            shutil.copytree(talker_bundle, folder / "target")
        given: dict[str, Any] = {
            "target": str(talker),
            "prompts": (tmp_path / "prompts.jsonl",),
            "output": folder,
            "max_len": MAX_LEN,
            "max_new_tokens": 12,
            "rows": 3,
            "threads": 1,
        }
        return DataRequest(**{**given, **options})

    return ask
