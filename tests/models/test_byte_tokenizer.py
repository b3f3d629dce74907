"""The tokenizer of models without one: bytes are ids, other ids are readable."""

from __future__ import annotations

from pathlib import Path

import pytest

from tilewright.errors import RequestError
from tilewright.models.checkpoints.base import TokenizerSource
from tilewright.models.tokenizer.byte_tokenizer import byte_tokenizer
from tilewright.models.tokenizer.load import load_tokenizer

TEXTS = [
    "",
    "hello",
    "zwei\nZeilen 🎉\t é",
    "\x00\x7f",
    "a  b",
    "<300> <s> <|im_end|>",
    "日本" * 40,
]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("add_special", [False, True])
def test_ids_are_bytes_and_come_back(text: str, add_special: bool) -> None:
    tokenizer = byte_tokenizer(512, "shape:x")
    ids = tokenizer.encode(text, add_special=add_special)
    assert ids == list(text.encode())
    assert tokenizer.decode(ids) == text


def test_other_ids_are_shown_as_numbers_and_streams_agree() -> None:
    tokenizer = byte_tokenizer(1000, "shape:x")
    ids = [300, 104, 105, 256, 999, 0xF0, 0x9F, 0x8E, 0x89, 400]
    assert tokenizer.decode(ids) == " <300>hi <256> <999>🎉 <400>"
    stream = tokenizer.stream()
    assert "".join(map(stream.push, ids)) + stream.flush() == tokenizer.decode(ids)


def test_an_answer_comes_back_as_the_ids_it_was_made_of() -> None:
    tokenizer = byte_tokenizer(1000, "shape:x")
    ids = [300, 104, 105, 256, 999, 0xF0, 0x9F, 0x8E, 0x89, 400, 400, 32]
    assert tokenizer.encode(tokenizer.decode(ids)) == ids


@pytest.mark.parametrize("text", [" <255>", " <1000>", " <0300>", "<300>", " <300", " <>"])
def test_what_is_no_name_of_an_id_is_bytes(text: str) -> None:
    assert byte_tokenizer(1000, "shape:x").encode(text) == list(text.encode())


def test_every_id_has_its_own_bytes() -> None:
    tokenizer = byte_tokenizer(600, "shape:x")
    assert [tokenizer.token_bytes(index) for index in range(256)] == [
        bytes([index]) for index in range(256)
    ]
    assert len({tokenizer.token_bytes(index) for index in range(600)}) == 600
    assert tokenizer.vocab_size == 600 and tokenizer.token_bytes(600) == b""


def test_it_ends_nothing_and_has_no_template() -> None:
    tokenizer = byte_tokenizer(512, "shape:x")
    assert (tokenizer.eos_ids, tokenizer.bos_id, tokenizer.special_ids) == ((), None, frozenset())
    assert not tokenizer.has_chat_template
    with pytest.raises(RequestError, match="shape:x"):
        tokenizer.apply_chat_template([])
    with pytest.raises(RequestError, match="lone surrogate"):
        tokenizer.encode("\ud800")


def test_saved_and_read_again_at_a_real_size(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer(152064, "shape:x")
    tokenizer.save(tmp_path / "tokenizer")
    again = load_tokenizer(TokenizerSource(tmp_path / "tokenizer"))
    assert again.content_hash() == tokenizer.content_hash()
    assert again.vocab_size == 152064 and again.decode([152063]) == " <152063>"
    assert tokenizer.content_hash() != byte_tokenizer(512, "shape:x").content_hash()
