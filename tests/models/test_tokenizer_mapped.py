"""A mapped tokenizer equals the library; a damaged file is refused in one line."""

from __future__ import annotations

import random
from pathlib import Path

import hypothesis
import hypothesis.strategies as st
import pytest
import tokenizers
from tokenizers import AddedToken, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE, Unigram

from tests.models.test_tokenizer import CORPUS, MESSAGES
from tests.models.test_tokenizer_save import MAKERS, check_same, hugging_face
from tilewright.errors import CheckpointError
from tilewright.models.tokenizer.load import load_mapped
from tilewright.models.tokenizer.mapped_backend import MappedBackend
from tilewright.models.tokenizer.tokenizer import Tokenizer
from tilewright.models.tokenizer.vocabulary import Vocabulary

LETTERS = "abcdef▁"
NUM_TEXTS = 400


def random_bpe(seed: int, *, byte_fallback: bool) -> Tokenizer:
    """A vocabulary of random merges, several of which often have the same result."""
    rng = random.Random(seed)
    base = [*LETTERS, "<unk>", *(f"<0x{byte:02X}>" for byte in range(256) if byte_fallback)]
    vocab = {token: index for index, token in enumerate(base)}
    parts, merges = list(LETTERS), []
    for _ in range(120):
        left, right = rng.choice(parts), rng.choice(parts)
        if len(left + right) <= 8 and (left, right) not in merges:
            merges.append((left, right))
            vocab.setdefault(left + right, len(vocab))
            parts.append(left + right)
    backend = tokenizers.Tokenizer(
        BPE(vocab, merges, unk_token="<unk>", fuse_unk=seed % 2 == 0, byte_fallback=byte_fallback)
    )
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", split=seed % 3 == 0)
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    backend.add_special_tokens(["<s>", AddedToken("</s>", rstrip=True)])
    backend.add_tokens([AddedToken("abc", single_word=True), AddedToken("dé", normalized=True)])
    return Tokenizer(Vocabulary(Path("random"), backend, {"bos_token": "<s>"}, (1,), None))


def mapped(ours: Tokenizer, folder: Path) -> Tokenizer:
    path = folder / "tokenizer.bin"
    path.write_bytes(ours.mapped_bytes())
    return load_mapped(path, Path("mapped"))


def is_tabled(tokenizer: Tokenizer) -> bool:
    """Whether it answers from the tables, without the library's backend."""
    backend = tokenizer._backend
    return isinstance(backend, MappedBackend) and backend._whole is None


@pytest.mark.parametrize("kind", [*MAKERS, "folder", "folder_with_flags"])
def test_mapped_tokenizer_of_a_checkpoint_equals_it(kind: str, tmp_path: Path) -> None:
    flags = {"add_bos_token": False, "add_eos_token": True} if kind.endswith("flags") else {}
    ours = MAKERS[kind]() if kind in MAKERS else hugging_face(tmp_path / "source", **flags)
    again = mapped(ours, tmp_path)
    for line in [*CORPUS, "<|im_start|>x<think> <|im_end|>"]:
        check_same(ours, again, line)
    assert is_tabled(again)
    assert again.content_hash() == ours.content_hash()
    assert (again.vocab_size, again.num_ids) == (ours.vocab_size, ours.num_ids)
    assert (again.bos_id, again.eos_ids) == (ours.bos_id, ours.eos_ids)
    assert (again.special_ids, again.chat_template) == (ours.special_ids, ours.chat_template)
    assert again.has_chat_template == ours.has_chat_template
    if ours.chat_template:
        assert again.apply_chat_template(MESSAGES) == ours.apply_chat_template(MESSAGES)
    for index in range(ours.num_ids + 2):
        assert again.token_bytes(index) == ours.token_bytes(index)


@pytest.mark.parametrize("seed", range(6))
def test_mapped_tokenizer_of_random_merges_equals_the_library(seed: int, tmp_path: Path) -> None:
    ours = random_bpe(seed, byte_fallback=seed >= 3)
    again, rng = mapped(ours, tmp_path), random.Random(seed)
    for _ in range(NUM_TEXTS):
        length = rng.randrange(60)
        line = "".join(
            rng.choice([*LETTERS, " ", "e\u0301", "d\u00e9", "<s>", "abc", "數"])
            for _ in range(length)
        )
        assert again.encode(line) == ours.encode(line), line
        assert again.decode(again.encode(line)) == ours.decode(ours.encode(line)), line
    assert is_tabled(again)


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, Tokenizer]:
    ours = MAKERS["sentencepiece"]()
    return ours, mapped(ours, tmp_path_factory.mktemp("mapped"))


@hypothesis.given(line=st.text(st.characters(exclude_categories=["Cs"]), max_size=60))
def test_mapped_tokenizer_of_any_text_equals_the_library(
    line: str, sentencepiece: tuple[Tokenizer, Tokenizer]
) -> None:
    check_same(*sentencepiece, line)


def test_mapped_tokenizer_of_a_long_text_builds_the_library(tmp_path: Path) -> None:
    ours = MAKERS["byte_level"]()
    again, line = mapped(ours, tmp_path), "the quick brown fox " * 14000
    assert again.encode(line) == ours.encode(line)
    assert not is_tabled(again)
    assert again.encode("the fox") == ours.encode("the fox")


def test_mapped_tokenizer_without_tables_is_the_library(tmp_path: Path) -> None:
    backend = tokenizers.Tokenizer(Unigram([("a", -1.0), ("ab", -1.5), ("b", -2.0)], 0, False))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    ours = Tokenizer(Vocabulary(Path("unigram"), backend, {}, (), None))
    again = mapped(ours, tmp_path)
    assert again.encode("abba") == ours.encode("abba") and not is_tabled(again)
    assert again.num_ids == ours.num_ids


def test_damaged_mapped_tokenizer_is_refused(tmp_path: Path) -> None:
    path, rng = tmp_path / "tokenizer.bin", random.Random(0)
    sound = MAKERS["sentencepiece"]().mapped_bytes()
    head = len(sound) - 40_000
    for _ in range(120):
        data = bytearray(sound)
        if rng.random() < 0.3:
            data = data[: rng.randrange(len(data))]
        else:
            for _ in range(rng.randrange(1, 8)):
                data[rng.randrange(min(len(data), max(head, 4096)))] = rng.randrange(256)
        path.write_bytes(data)
        said = ""
        try:
            load_mapped(path, path).encode("some text")
        except CheckpointError as error:
            said = str(error)
        assert "\n" not in said
