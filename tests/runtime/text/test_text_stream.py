"""Detokenizer against `tokenizer.decode`, StopStrings against a reference on the whole text."""

import time
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

from eagle3.runtime.errors import RequestError
from eagle3.runtime.text.detokenizer import Detokenizer
from eagle3.runtime.text.stop_strings import MAX_STOP_CHARS, MAX_STOPS, StopStrings
from eagle3.runtime.text.text_stream import TextStream

CORPUS = ["the quick brown fox jumps", "über naïve café 日本語 😀😀", "    def f(x):\n\treturn x"]
SPECIAL = AddedToken("<|end|>", special=True)
BYTE_TOKENS = [f"<0x{byte:02X}>" for byte in range(256)]


@cache
def byte_level() -> Tokenizer:
    """GPT-2 style, with merges across and inside characters and two kinds of added tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS * 3, trainer)
    tokenizer.add_special_tokens([SPECIAL])
    tokenizer.add_tokens([AddedToken("<tool 日本>", special=False)])
    return tokenizer


def byte_fallback(*decoder_parts: Any) -> Tokenizer:
    """SentencePiece style as in Llama 2: spaces as U+2581, unknown characters as byte tokens."""
    pieces = ["▁", "▁▁", "▁the", "▁q", "th", "e", "t", "h", "q", "u", "x", "日", "日本", "é"]
    vocab = {token: i for i, token in enumerate(["<unk>", "</s>", *BYTE_TOKENS, *pieces])}
    merges = [("▁", "▁"), ("t", "h"), ("日", "本")]
    vocab["本"] = len(vocab)
    tokenizer = Tokenizer(
        models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(list(decoder_parts))
    tokenizer.add_special_tokens([AddedToken("</s>", special=True)])
    return tokenizer


@cache
def llama2() -> Tokenizer:
    return byte_fallback(
        decoders.Replace("▁", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
        decoders.Strip(" ", 1, 0),
    )


@cache
def gemma() -> Tokenizer:
    return byte_fallback(decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse())


@cache
def metaspace_fallback() -> Tokenizer:
    return byte_fallback(decoders.ByteFallback(), decoders.Metaspace())


@cache
def metaspace() -> Tokenizer:
    """T5 style unigram: every character of a small alphabet, no bytes."""
    pieces = ["<unk>", "▁", *"abcdefgh日本é😀", "▁abc", "de", "▁▁"]
    tokenizer = Tokenizer(models.Unigram([(piece, -1.0 * i) for i, piece in enumerate(pieces)], 0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


@cache
def without_decoder() -> Tokenizer:
    vocab = {"[UNK]": 0, "one": 1, "two": 2, "日本": 3}
    tokenizer = Tokenizer(models.WordLevel(vocab, "[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return tokenizer


FACTORIES = [byte_level, llama2, gemma, metaspace_fallback, metaspace, without_decoder]


def stream(tokenizer: Tokenizer, ids: Iterable[int]) -> list[str]:
    detokenizer = Detokenizer(tokenizer)
    return [*map(detokenizer.push, ids), detokenizer.flush()]


def one(tokenizer: Tokenizer, token: str) -> int:
    token_id = tokenizer.token_to_id(token)
    assert token_id is not None
    return int(token_id)


any_text = st.text(
    st.one_of(
        st.characters(exclude_categories=["Cs"]),
        st.sampled_from("the qux▁ \n日本é😀👨‍👩‍👧\ufffdabcdefgh"),
    ),
    max_size=30,
)


@pytest.mark.parametrize("factory", FACTORIES)
@given(text=any_text)
@example(text="")
@example(text="  the 日本   the")
@example(text="\ufffd")
@example(text="日\ufffd\ufffd")
@example(text="🏳️‍🌈 e\u0301 \u200d")
def test_pushes_join_to_the_decoded_text(factory: Callable[[], Tokenizer], text: str) -> None:
    tokenizer = factory()
    ids = tokenizer.encode(text).ids
    assert "".join(stream(tokenizer, ids)) == tokenizer.decode(ids)


@pytest.mark.parametrize("factory", FACTORIES)
@given(data=st.data())
def test_ids_that_are_no_usual_encoding(factory: Callable[[], Tokenizer], data: Any) -> None:
    """A model may emit any ids: pushes join to the decoded text wherever that is valid."""
    tokenizer = factory()
    vocab = tokenizer.get_vocab()
    no_bytes = sorted(i for token, i in vocab.items() if not token.startswith("<0x"))
    some_id = st.one_of(st.sampled_from(no_bytes), st.sampled_from(sorted(vocab.values())))
    ids = data.draw(st.lists(some_id, max_size=12))
    whole = tokenizer.decode(ids)
    pieces = stream(tokenizer, ids)
    if "\ufffd" not in whole:
        assert "".join(pieces) == whole


@given(data=st.binary(max_size=12))
@example(data=b"\xe2\x82")
@example(data=b"\xed\xa0")
@example(data="€".encode() + b"\xff" + "€".encode() + b"\xf0\x9f\x98")
def test_invalid_bytes_become_what_utf8_makes_of_them(data: bytes) -> None:
    """Byte-level: as Python decodes, but what may be half a character at the end is dropped."""
    tokenizer = byte_level()
    shown = "".join(stream(tokenizer, [byte_id(tokenizer, byte) for byte in data]))
    expected = data.decode(errors="replace")
    assert expected.startswith(shown)
    assert expected[len(shown) :] in ("", "\ufffd", "\ufffd\ufffd")
    dotted = stream(tokenizer, [byte_id(tokenizer, byte) for byte in data + b"."])
    assert "".join(dotted) == expected + "."


def byte_id(tokenizer: Tokenizer, byte: int) -> int:
    """Id of the token that is one byte, found through the library's own alphabet order."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    if byte in printable:
        return one(tokenizer, chr(byte))
    return one(tokenizer, chr(256 + [b for b in range(256) if b not in printable].index(byte)))


@pytest.mark.parametrize("factory", [byte_level, llama2, gemma, metaspace_fallback])
@given(text=st.text(st.sampled_from("é日😀x"), min_size=1, max_size=8), cut=st.integers(1, 3))
def test_no_half_character_is_ever_shown(
    factory: Callable[[], Tokenizer], text: str, cut: int
) -> None:
    """Byte by byte, each character comes with its last byte; a cut one at the end never does."""
    tokenizer = factory()
    to_id = (
        (lambda byte: byte_id(tokenizer, byte))
        if factory is byte_level
        else (lambda byte: one(tokenizer, BYTE_TOKENS[byte]))
    )
    expected = [piece for char in text for piece in [""] * (len(char.encode()) - 1) + [char]]
    ids = [to_id(byte) for byte in text.encode()]
    assert stream(tokenizer, ids) == [*expected, ""]
    tail = [to_id(byte) for byte in "😀".encode()[:cut]]
    assert "".join(stream(tokenizer, ids + tail)) == text


@pytest.mark.parametrize("byte", [0xFF, 0x80, 0xE2, 0xF0])
@pytest.mark.parametrize("factory", [byte_level, llama2, metaspace_fallback])
def test_an_endless_run_of_invalid_bytes_is_not_held(
    factory: Callable[[], Tokenizer], byte: int
) -> None:
    tokenizer = factory()
    token = byte_id(tokenizer, byte) if factory is byte_level else one(tokenizer, BYTE_TOKENS[byte])
    text = "".join(stream(tokenizer, [token] * 50))
    assert set(text) == {"\ufffd"}
    assert len(text) >= 49


def test_text_before_a_bad_byte_is_not_spoiled() -> None:
    """`decode` turns a whole run of byte tokens to U+FFFD for one bad byte; shown text stays."""
    tokenizer = llama2()
    ids = [one(tokenizer, BYTE_TOKENS[byte]) for byte in "€".encode() + b"\xff"]
    assert tokenizer.decode(ids) == "\ufffd" * 4
    assert stream(tokenizer, ids) == ["", "", "€", "\ufffd", ""]
    ids = [one(tokenizer, BYTE_TOKENS[0xE2]), one(tokenizer, "▁the")]
    assert stream(tokenizer, ids) == ["", "\ufffd the", ""]


@pytest.mark.parametrize("factory", [llama2, metaspace, metaspace_fallback])
def test_only_the_first_leading_space_goes(factory: Callable[[], Tokenizer]) -> None:
    tokenizer = factory()
    word = "▁abc" if factory is metaspace else "▁the"
    text = word[1:]
    assert stream(tokenizer, [one(tokenizer, word)] * 3) == [text, f" {text}", f" {text}", ""]


def test_special_tokens_are_skipped_even_inside_a_character() -> None:
    tokenizer = byte_level()
    end = one(tokenizer, "<|end|>")
    first, *rest = [byte_id(tokenizer, byte) for byte in "é".encode()]
    assert stream(tokenizer, [end, first, end, *rest, end]) == ["", "", "", "é", "", ""]


def test_added_tokens_are_shown() -> None:
    tokenizer = byte_level()
    ids = tokenizer.encode("the <tool 日本> fox").ids
    assert one(tokenizer, "<tool 日本>") in ids
    assert "".join(stream(tokenizer, ids)) == "the <tool 日本> fox"


@pytest.mark.parametrize("factory", FACTORIES)
def test_an_id_without_token_adds_nothing(factory: Callable[[], Tokenizer]) -> None:
    assert stream(factory(), [100_000]) == ["", ""]


@pytest.mark.parametrize("factory", [byte_level, llama2])
def test_the_cost_of_a_token_does_not_grow(factory: Callable[[], Tokenizer]) -> None:
    """50,000 tokens in seconds; decoding everything on each push would take many minutes."""
    tokenizer = factory()
    ids = tokenizer.encode("the qux 日本😀 " * 20).ids
    detokenizer = Detokenizer(tokenizer)
    begin = time.perf_counter()
    for i in range(50_000):
        detokenizer.push(ids[i % len(ids)])
    assert time.perf_counter() - begin < 20


def reference(stops: Sequence[str], text: str) -> tuple[str, bool]:
    """Reads character by character, ends at the first stop string whole, the longest one."""
    for end in range(1, len(text) + 1):
        sizes = [len(stop) for stop in stops if text[:end].endswith(stop)]
        if sizes:
            return text[: end - max(sizes)], True
    return text, False


small_text = st.text("ab日", max_size=12)
stop_lists = st.lists(st.text("ab日", min_size=1, max_size=4), max_size=3)


@given(stops=stop_lists, chunks=st.lists(small_text, max_size=8))
@example(stops=["abc", "b"], chunks=["a", "bc"])
@example(stops=["aab"], chunks=["aa", "ab"])
def test_stop_strings_agree_with_the_whole_text(stops: list[str], chunks: list[str]) -> None:
    stopper = StopStrings(stops)
    shown = ""
    for i, chunk in enumerate(chunks):
        emit, stopped = stopper.push(chunk)
        shown += emit
        expected, expected_stop = reference(stops, "".join(chunks[: i + 1]))
        assert stopped == expected_stop == stopper.stopped
        assert expected.startswith(shown)
        held = expected[len(shown) :]
        assert not held or any(stop.startswith(held) for stop in stops)
    shown += stopper.flush()
    assert shown == reference(stops, "".join(chunks))[0]
    assert stopper.flush() == ""


def test_text_is_held_only_as_long_as_needed() -> None:
    stopper = StopStrings(["\nUser:", "END"])
    assert stopper.push("hello\nUs") == ("hello", False)
    assert stopper.push("ed. E") == ("\nUsed. ", False)
    assert stopper.push("N") == ("", False)
    assert stopper.push("D and more") == ("", True)
    assert stopper.push("anything") == ("", True)
    assert stopper.flush() == ""


def test_no_stop_strings_hold_nothing() -> None:
    assert StopStrings().push("text") == ("text", False)


@pytest.mark.parametrize(
    ("stops", "message"),
    [
        (["a", ""], r"stop\[1\] must have 1 to 512 characters, got 0"),
        (
            ["x" * (MAX_STOP_CHARS + 1)],
            rf"stop\[0\] must have 1 to {MAX_STOP_CHARS} characters, got {MAX_STOP_CHARS + 1}",
        ),
        (
            ["a"] * (MAX_STOPS + 1),
            rf"stop must have at most {MAX_STOPS} strings, got {MAX_STOPS + 1}",
        ),
        (["a", 3], r"stop\[1\] must be a string, got 3"),
        ([b"a"], r"stop\[0\] must be a string, got b'a'"),
        ("END", r"stop must be a list of strings, got 'END'"),
        (None, r"stop must be a list of strings, got None"),
        (7, r"stop must be a list of strings, got 7"),
    ],
)
def test_bad_stop_strings_are_refused(stops: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        StopStrings(stops)


def test_a_stop_string_across_tokens_and_inside_one() -> None:
    tokenizer = byte_level()
    text = "the quick 日本語 brown fox"
    ids = tokenizer.encode(text).ids
    for stop in ("ick", "本語 b", " brown", "x"):
        stream_ = TextStream(tokenizer, [stop])
        shown, stopped = "", False
        for token in ids:
            piece, stopped = stream_.push(token)
            shown += piece
            if stopped:
                break
        assert stopped
        assert shown + stream_.flush() == text[: text.index(stop)]


def test_a_stream_gives_back_what_it_held() -> None:
    tokenizer = byte_level()
    stream_ = TextStream(tokenizer, ["foxes"])
    pieces = [stream_.push(token) for token in tokenizer.encode("the fox").ids]
    assert "".join(piece for piece, _ in pieces) == "the "
    assert not any(stopped for _, stopped in pieces)
    assert stream_.flush() == "fox"
