"""Prompt files: what is read, what is counted and left out, what is never trained on."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle3.runtime.errors import DataError
from eagle3.train.data.entries import Answer, BrokenLine, Entry, entry_of_line, entry_of_row
from eagle3.train.data.prompt_selection import EvaluationTurns, Selection, read_evaluation

LONG = "How many apples has Ann, who had 17 and gave 4 of them away?"


def write(path: Path, *rows: Any) -> Path:
    """A line for each row; bytes as they are."""
    lines = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
    path.write_bytes(b"\n".join([*lines, b""]))
    return path


def selected(*files: Path, evaluation: EvaluationTurns | None = None) -> Selection:
    selection = Selection(evaluation or EvaluationTurns())
    selection.add_files(files)
    return selection


# What a line may be


def test_every_kind_of_line() -> None:
    assert entry_of_row({"prompt": "a", "source": "s", "license": "MIT", "more": 1}) == Entry(
        "a", source="s", license="MIT"
    )
    assert entry_of_row({"turns": ["a", "b"]}) == Entry("a")
    row = {"prompt": "a", "answer": "b", "answer_ids": [5, 1], "ended": False, "temperature": 0}
    assert entry_of_row(row) == Entry("a", Answer("b", (5, 1), False, 0))
    assert entry_of_row({"prompt": "a", "answer": "b"}) == Entry("a", Answer("b"))
    assert entry_of_line("  ü ".encode(), is_json=False) == Entry("  ü ")


def test_messages_become_turns() -> None:
    said = [("system", ""), ("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")]
    messages = [{"role": role, "content": text} for role, text in said]
    entry = entry_of_row({"messages": messages})
    assert entry == Entry("c", Answer("d"), "", (("a", "b"),))
    assert entry.messages == messages[:-1] and entry.opening == messages[:2]
    assert entry.asked == ("a", "c")
    open_end = entry_of_row({"messages": messages[:-1]})
    assert open_end.answer is None and open_end.text == entry.text
    assert entry_of_row({"messages": messages[1:2]}) == Entry("a")


BROKEN: list[tuple[bytes, str]] = [
    (b"{", "not JSON"),
    (b"[" * 100_000, "not JSON"),
    (b"[1]", "not a JSON object"),
    (b"null", "not a JSON object"),
    (b'{"prompt": "\xff"}', "not UTF-8"),
    (b'{"prompt": "\\ud800"}', "unpaired surrogate"),
    (b"{}", "prompt is missing"),
    (b'{"turns": []}', "prompt is missing"),
    (b'{"turns": "a"}', "prompt is missing"),
    (b'{"turns": [3]}', "prompt is not a string"),
    (b'{"prompt": 3}', "prompt is not a string"),
    (b'{"prompt": " \\n "}', "prompt is empty"),
    (b'{"prompt": "a", "source": 3}', "source is not a string"),
    (b'{"prompt": "a", "answer": 3}', "answer is not a string"),
    (b'{"prompt": "a", "answer": ""}', "answer is empty"),
    (b'{"prompt": "a", "answer": "", "answer_ids": []}', "answer is empty"),
    (b'{"prompt": "a", "answer": "b", "answer_ids": "5"}', "answer_ids is not a list of integers"),
    (
        b'{"prompt": "a", "answer": "b", "answer_ids": [true]}',
        "answer_ids is not a list of integers",
    ),
    (b'{"prompt": "a", "answer": "b", "ended": 1}', "ended is not true or false"),
    (b'{"prompt": "a", "answer": "b", "temperature": "hot"}', "temperature is not a number"),
    (b'{"messages": []}', "messages is not a list of messages"),
    (b'{"messages": "a"}', "messages is not a list of messages"),
    (b'{"messages": ["a"]}', "a message is not an object"),
    (
        b'{"messages": [{"role": "user"}]}',
        "role or content of a message is missing or not a string",
    ),
    (b'{"messages": [{"role": "user", "content": ""}]}', "prompt is empty"),
    (
        b'{"messages": [{"role": "assistant", "content": "a"}]}',
        "messages do not alternate between user and assistant",
    ),
    (
        b'{"messages": [{"role": "system", "content": "a"}]}',
        "messages do not alternate between user and assistant",
    ),
]


@pytest.mark.parametrize(("line", "reason"), BROKEN)
def test_a_broken_line_says_why(line: bytes, reason: str) -> None:
    with pytest.raises(BrokenLine, match=f"^{reason}$"):
        entry_of_line(line, is_json=True)


@settings(max_examples=200, deadline=None)
@given(
    row=st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=3),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(["prompt", "turns", "messages", "answer", "answer_ids", "role"])
                | st.sampled_from(["content", "ended", "temperature", "source"]),
                inner,
                max_size=5,
            )
        ),
        max_leaves=12,
    )
)
def test_any_json_is_a_conversation_or_broken(row: Any) -> None:
    try:
        entry = entry_of_line(json.dumps(row).encode(), is_json=True)
    except BrokenLine:
        return
    assert all(prompt.strip() for prompt in entry.asked)


# Files


def test_broken_lines_are_counted_and_named_and_the_rest_is_used(tmp_path: Path) -> None:
    path = write(tmp_path / "p.jsonl", {"prompt": "a"}, *(b"{" for _ in range(7)), {}, b"")
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes() + b'{"prompt": "b"}\r\n\r\n')
    selection = selected(path)
    assert [entry.prompt for entry in selection.entries] == ["a", "b"]
    assert selection.counts.read == 10
    assert selection.counts.broken == {"not JSON": 7, "prompt is missing": 1}
    lines = selection.counts.lines()
    assert lines[0] == "10 lines read, 8 invalid (not JSON: 7, prompt is missing: 1)"
    assert lines[1] == f"{path}, line 2: not JSON" and "... and 3 more" in lines


def test_a_text_file_is_a_prompt_a_line(tmp_path: Path) -> None:
    path = tmp_path / "p.txt"
    path.write_bytes("a {\n\n  \n\u2028b\n\xe9\n".encode() + b"\xff\n")
    selection = selected(path)
    assert [entry.prompt for entry in selection.entries] == ["a {", "\u2028b", "\xe9"]
    assert selection.counts.broken == {"not UTF-8": 1}


@pytest.mark.parametrize("content", [b"", b"\n\n", b"{\n{\n"])
def test_a_file_without_a_prompt_is_an_error(tmp_path: Path, content: bytes) -> None:
    good, bad = write(tmp_path / "good.jsonl", {"prompt": "a"}), tmp_path / "bad.jsonl"
    bad.write_bytes(content)
    with pytest.raises(DataError, match=r"bad\.jsonl contains no usable prompt"):
        selected(good, bad)


def test_a_file_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"none\.jsonl cannot be read: No such file"):
        selected(tmp_path / "none.jsonl")
    with pytest.raises(DataError, match="cannot be read: Is a directory"):
        selected(tmp_path)


def test_duplicates_are_dropped_and_the_answer_is_kept(tmp_path: Path) -> None:
    path = write(
        tmp_path / "p.jsonl",
        {"prompt": "a  b"},
        {"prompt": "c"},
        {"prompt": " a b\n", "answer": "d"},
        {"prompt": "a b", "answer": "e"},
        {"prompt": "A b"},
    )
    selection = selected(path)
    assert [e.prompt for e in selection.entries] == [" a b\n", "c", "A b"]
    assert selection.entries[0].answer == Answer("d")
    assert selection.counts.duplicates == 2


def test_what_is_cut_is_forgotten() -> None:
    selection = Selection(EvaluationTurns())
    for prompt in "abc":
        selection.add(Entry(prompt))
    selection.cut(1)
    selection.add(Entry("c"))
    selection.cut(None)
    assert [e.prompt for e in selection.entries] == ["a", "c"]
    assert selection.counts.duplicates == 0


# Evaluation prompts


@pytest.mark.parametrize(
    ("prompt", "refused"),
    [
        ("Short one?", True),
        ("  short\tONE? ", True),
        ("A short one? Yes.", False),  # a contained turn this short says nothing
        (LONG, True),
        (f"Answer me. {LONG.upper()} Think.", True),
        (LONG[3:], True),  # 50 characters or more, within a turn
        (LONG[20:], False),
        (LONG.replace("17", "18"), False),
        ("x" * 200, False),
    ],
)
def test_an_evaluation_prompt_is_refused(prompt: str, refused: bool) -> None:
    assert EvaluationTurns(["short one?", LONG, " "]).has(prompt) is refused


@settings(max_examples=200, deadline=None)
@given(
    turns=st.lists(st.text("ab \n", max_size=70), max_size=4),
    around=st.tuples(st.text("ab", max_size=5), st.text("ab", max_size=5)),
    data=st.data(),
)
def test_containment_is_what_it_says(
    turns: list[str], around: tuple[str, str], data: st.DataObject
) -> None:
    own = data.draw(st.sampled_from([*turns, "a" * 60]))
    prompt = around[0] + own[data.draw(st.integers(0, 15)) :] + around[1]

    def folded(text: str) -> str:
        return " ".join(text.casefold().split())

    text, every = folded(prompt), [folded(turn) for turn in turns if turn.strip()]
    expected = any(
        text == turn or (len(turn) >= 50 and turn in text) or (len(text) >= 50 and text in turn)
        for turn in every
    )
    assert EvaluationTurns(turns).has(prompt) is expected


def test_evaluation_files(tmp_path: Path) -> None:
    path = write(tmp_path / "e.jsonl", {"turns": ["one", "two"]}, {"prompt": "three"})
    text = tmp_path / "e.txt"
    text.write_text("four\n")
    evaluation = read_evaluation([path, text])
    assert len(evaluation) == 4
    prompts = write(tmp_path / "p.jsonl", {"prompt": "five"}, {"prompt": "TWO"}, {"prompt": "Four"})
    messages = [("user", "six"), ("assistant", "x"), ("user", "three")]
    talk = {"messages": [{"role": role, "content": text} for role, text in messages]}
    selection = selected(write(tmp_path / "m.jsonl", talk, {"prompt": "seven"}), prompts)
    assert len(selection.entries) == 5
    kept = selected(tmp_path / "m.jsonl", prompts, evaluation=evaluation)
    assert [entry.prompt for entry in kept.entries] == ["seven", "five"]
    assert kept.counts.evaluation == 3


@pytest.mark.parametrize("line", [b"{", b"[]", b"{}", b'{"turns": []}', b'{"turns": [1]}', b"\xff"])
def test_an_evaluation_line_that_is_not_understood_is_an_error(tmp_path: Path, line: bytes) -> None:
    path = write(tmp_path / "e.jsonl", {"prompt": "a"}, line)
    with pytest.raises(DataError, match=r"e\.jsonl, line 2"):
        read_evaluation([path])


def test_an_evaluation_file_without_prompts_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="contains no evaluation prompt"):
        read_evaluation([write(tmp_path / "e.jsonl")])
    with pytest.raises(DataError, match="cannot be read"):
        read_evaluation([Path(os.devnull) / "e.jsonl"])
