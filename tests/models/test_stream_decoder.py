"""Streams of ids: no half characters, nothing taken back, joined the same as decoding at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
from tokenizers.pre_tokenizers import ByteLevel

from tilewright.models.checkpoints.base import TokenizerSource
from tilewright.models.tokenizer.load import load_tokenizer
from tilewright.models.tokenizer.tokenizer import Tokenizer

text = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)


def build(model: str, tokens: list[str], types: list[int], **more: Any) -> Tokenizer:
    keys = {"model": model, "tokens": tokens, "token_type": np.array(types, np.int32), **more}
    metadata = {f"tokenizer.ggml.{key}": value for key, value in keys.items()}
    return load_tokenizer(TokenizerSource(Path("m.gguf"), metadata))


@pytest.fixture(scope="module")
def byte_level() -> Tokenizer:
    tokens = ["<|end|>", "<think>", *sorted(ByteLevel.alphabet()), "Ġa", "ðŁ"]
    return build("gpt2", tokens, [3, 4] + [1] * 258, merges=["Ġ a", "ð Ł"])


@pytest.fixture(scope="module")
def pieces() -> Tokenizer:
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens += ["▁", "a", "▁a", "▁▁", "é", "数"]
    scores = np.array([0.0] * 259 + [-9.0, -9.0, -1.0, -2.0, -9.0, -9.0], np.float32)
    return build("llama", tokens, [2, 3, 3] + [6] * 256 + [1] * 6, scores=scores)


@hypothesis.given(prompt=text, line=text)
def test_decode_after_a_prompt_gives_the_rest_of_the_whole_text(
    prompt: str, line: str, byte_level: Tokenizer, pieces: Tokenizer
) -> None:
    for ours in (byte_level, pieces):
        before, ids = ours.encode(prompt, add_special=True), ours.encode(line)
        rest = ours.decode(ids, after=before)
        assert ours.decode([*before, *ids]) == ours.decode(before) + rest
        stream = ours.stream(after=before)
        assert stream.push_all(ids) + stream.flush() == rest


def test_decode_after_special_tokens_only_begins_a_text(pieces: Tokenizer) -> None:
    ids = pieces.encode("a a")
    assert pieces.decode(ids, after=(1,)) == pieces.decode(ids) == "a a"
    assert pieces.decode(ids, after=(1, 260)) == " a a"
    assert pieces.decode([2, *ids], skip_special=False, after=(260,)) == "</s> a a"


@hypothesis.given(line=text)
def test_streams_hold_back_half_characters(
    line: str, byte_level: Tokenizer, pieces: Tokenizer
) -> None:
    for ours in (byte_level, pieces):
        ids = ours.encode(line)
        stream, shown = ours.stream(), ""
        whole = ours.decode(ids)
        for index in ids:
            shown += stream.push(index)
            assert whole.startswith(shown)
        assert shown + stream.flush() == whole


@hypothesis.given(ids=st.lists(st.integers(0, 262), max_size=40))
def test_streams_of_any_ids(ids: list[int], byte_level: Tokenizer) -> None:
    stream = byte_level.stream()
    assert "".join([stream.push(index) for index in ids] + [stream.flush()]) == byte_level.decode(
        ids
    )


def test_ids_pushed_together_are_those_pushed_one_by_one(
    byte_level: Tokenizer, pieces: Tokenizer
) -> None:
    for each in (byte_level, pieces):
        ids = [*range(min(each.vocab_size, 300)), *each.encode("é 家 x"), each.vocab_size + 5]
        one, many = each.stream(), each.stream()
        apart = "".join(one.push(index) for index in ids) + one.flush()
        together = "".join(many.push_all(ids[at : at + 7]) for at in range(0, len(ids), 7))
        assert together + many.flush() == apart


def test_stream_byte_by_byte(pieces: Tokenizer) -> None:
    stream = pieces.stream()
    ids = [3 + byte for byte in "👍é".encode()]
    assert [stream.push(index) for index in ids] == ["", "", "", "👍", "", "é"]
    assert stream.flush() == ""
    assert stream.push(3 + 0xF0) == "" and stream.flush() == "\ufffd"
