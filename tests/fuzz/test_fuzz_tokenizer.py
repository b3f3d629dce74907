"""Tokenizer folders that lie: ids, tables, chains of steps, listed tokens."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from tests.fuzz.limits import guarded_apart
from tests.fuzz.mutations import ODD_VALUES, Mutation, damaged_trees, mutations
from tilewright.models.checkpoints.base import TokenizerSource
from tilewright.models.tokenizer.load import load_tokenizer

SETTINGS: dict[str, Any] = {
    "bos_token": "<s>",
    "eos_token": {"content": "</s>"},
    "added_tokens_decoder": {"0": {"content": "<s>", "special": True}},
    "chat_template": "{{ messages[0].content }}",
}
CHARSMAPS = [base64.b64encode(raw).decode() for raw in (b"\xff" * 4, bytes(8), b"\x08\0\0\0", b"")]
STEPS: tuple[Any, ...] = (
    *({"type": "Precompiled", "precompiled_charsmap": text} for text in CHARSMAPS),
    {"type": "Strip", "content": " ", "start": 10**9, "stop": 10**9},
    {"type": "Split", "pattern": {"Regex": "(a*)*b"}, "behavior": "Isolated", "invert": False},
    {"type": "Split", "pattern": {"Regex": "(?<a"}, "behavior": "Isolated", "invert": False},
    {"type": "FixedLength", "length": 0},
    {"type": "Replace", "pattern": {"String": ""}, "content": "aaaa"},
    {"type": "Prepend", "prepend": ""},
    {"type": "Unigram", "vocab": [["a", 0.0]], "unk_id": 9},
    {"type": "WordLevel", "vocab": {}, "unk_token": "q"},
    {"type": "BertProcessing", "sep": ["a", 1], "cls": ["b", 2]},
    {"type": "CTC", "pad_token": "", "word_delimiter_token": "", "cleanup": True},
    {"type": "Sequence", "normalizers": [], "pretokenizers": [], "decoders": [], "processors": []},
    {"direction": "Right", "max_length": 0, "strategy": "LongestFirst", "stride": 9},
)


def sound_tokenizer() -> dict[str, Any]:
    vocab = {"<s>": 0, "</s>": 1}
    vocab |= {text: 2 + n for n, text in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    vocab |= {"he": len(vocab), "ll": len(vocab) + 1}
    backend = Tokenizer(BPE(vocab=vocab, merges=[("h", "e"), ("l", "l")]))
    backend.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Replace("a", "b")])
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\p{N}{1,3}| ?\w+"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    backend.add_special_tokens(["<s>", "</s>"])
    tree: dict[str, Any] = json.loads(backend.to_str())
    return tree


SOUND = sound_tokenizer()


def use(folder: Path) -> None:
    tokenizer = load_tokenizer(TokenizerSource(folder))
    tokenizer.content_hash()
    if tokenizer.has_chat_template:
        tokenizer.apply_chat_template([{"role": "user", "content": "x"}])
    ids = tokenizer.encode("hello <s> 123" + "a" * 40, add_special=True)
    stream = tokenizer.stream()
    for index in [*ids, 5, 300, 10**6]:
        stream.push(index)
    tokenizer.decode([*ids, 5, 300, 10**6])


def check(folder: Path, tokenizer: Any = SOUND, settings: Any = SETTINGS) -> str:
    texts = [json.dumps(part).encode() for part in (tokenizer, settings)]
    return check_bytes(folder, *texts)


def check_bytes(folder: Path, tokenizer: bytes, settings: bytes) -> str:
    (folder / "tokenizer.json").write_bytes(tokenizer)
    (folder / "tokenizer_config.json").write_bytes(settings)
    # Its regular expressions and merges take more than their text.
    size = len(tokenizer) + len(settings)
    return guarded_apart(lambda: use(folder), file_size=size, factor=300)


def changed(**parts: Any) -> dict[str, Any]:
    return {**SOUND, **parts}


def test_the_sound_folder_is_used(scratch: Path) -> None:
    assert check(scratch) == ""


@given(tree=damaged_trees(SOUND, (*ODD_VALUES, *STEPS)))
@example(tree=changed(model={**SOUND["model"], "vocab": {**SOUND["model"]["vocab"], "zz": 2**31}}))
@example(tree=changed(normalizer=STEPS[0]))
@example(tree=changed(pre_tokenizer={"type": "FixedLength", "length": 0}))
@example(tree=changed(decoder=STEPS[4]))
@example(tree=changed(version="\0"))
def test_tokenizers_that_lie(tree: Any, scratch: Path) -> None:
    check(scratch, tree)


@given(tree=damaged_trees(SETTINGS))
@example(tree={**SETTINGS, "added_tokens_decoder": {"0": {"content": 5}}})
@example(tree={**SETTINGS, "added_tokens_decoder": {"9": {"content": "\ud800"}}})
@example(tree={**SETTINGS, "bos_token": "\ud800"})
def test_settings_that_lie(tree: Any, scratch: Path) -> None:
    check(scratch, settings=tree)


@given(mutation=mutations())
def test_damaged_bytes(mutation: Mutation, scratch: Path) -> None:
    raw = json.dumps(SOUND).encode()
    check_bytes(scratch, mutation(raw), b"{}")


BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
DOUBLE = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
TWICE = {
    "type": "TemplateProcessing",
    "single": [{"Sequence": {"id": "A", "type_id": 0}}] * 2,
    "pair": [],
    "special_tokens": {},
}


@pytest.mark.parametrize(
    "part",
    [
        {"normalizer": {"type": "Sequence", "normalizers": [DOUBLE] * 60}},
        {"normalizer": {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 10**6}},
        {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [BYTE_LEVEL] * 60}},
        {"post_processor": {"type": "Sequence", "processors": [TWICE] * 60}},
    ],
    ids=lambda part: str(next(iter(part))),
)
def test_chains_that_double_a_text(part: dict[str, Any], scratch: Path) -> None:
    assert "allowed: fewer steps" in check(scratch, changed(**part))


@pytest.mark.parametrize(
    "raw",
    [b"", b"\0", b"[" * 100_000, b'{"model":' * 100_000, b"\xff", b"[]", b"9" * 100_000],
    ids=lambda raw: f"{raw[:9]!r}-{len(raw)}"[2:],
)
def test_any_other_bytes(raw: bytes, scratch: Path) -> None:
    assert check_bytes(scratch, raw, b"{}")
    assert check_bytes(scratch, json.dumps(SOUND).encode(), raw)


@given(raw=st.binary(max_size=60))
def test_a_template_file_of_any_bytes(raw: bytes, scratch: Path) -> None:
    (scratch / "chat_template.jinja").write_bytes(raw)
    check(scratch)
    (scratch / "chat_template.jinja").unlink()
