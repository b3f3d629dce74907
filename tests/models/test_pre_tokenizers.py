"""Words of every pre-tokenizer, against another regex engine and patterns of its own spelling."""

from __future__ import annotations

from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest
import tokenizers
from tokenizers.models import BPE

from tests.models.test_tokenizer import CORPUS
from tilewright.models.tokenizer.pre_tokenizers import PRE_TOKENIZERS
from tilewright.models.tokenizer.tokenizer import byte_of_character

regex: Any = pytest.importorskip("regex")

# As llama.cpp spells them: for an engine without a local ignore-case flag.
ENDINGS = "(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = (
    ENDINGS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = (
    ENDINGS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN35 = (
    ENDINGS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+" + ENDINGS + "?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*" + ENDINGS + "?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SEED = (
    ENDINGS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}\r\n]+"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
BAILING = (
    r"'(?:[sSdDmMtT]|[lL][lL]|[vV][eE]|[rR][eE])|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
)
DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[一-龥\u3040-ゟ゠-ヿ]+",
    r"[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
)
DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[\u0800-龥가-\ud7ff]+", r"\p{N}")
BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"
FALCON = (r"[\p{P}\$\+<=>\^~\|`]+", GPT2, "[0-9]{3}")
EXPECTED: dict[str, tuple[str, ...]] = {
    "gpt-2": (GPT2,),
    "starcoder": (r"\p{N}", GPT2),
    "llama3": (LLAMA3,),
    "llama-v3": (LLAMA3,),
    "dbrx": (LLAMA3,),
    "deepseek-r1-qwen": (QWEN2,),
    "qwen35": (QWEN35,),
    "tekken": (TEKKEN,),
    "gpt-4o": (GPT4O,),
    "seed-coder": (SEED,),
    "bailingmoe": (BAILING,),
    "deepseek-v3": DEEPSEEK3,
    "deepseek-coder": DEEPSEEK_CODER,
    "bloom": (BLOOM,),
    "viking": (BLOOM, r"\p{N}"),
    "falcon": FALCON,
}
TEXT = st.text(
    st.one_of(
        st.sampled_from("aZéß'sSrReEllDtv09٣½ \n\r\t.,!?/_-`$+()[]{}一あ한\u0301\u0940ǅʰ"),
        st.characters(exclude_categories=["Cs", "Cn", "Co"]),
    ),
    max_size=50,
)


def cut(text: str, patterns: tuple[str, ...]) -> list[str]:
    """Matches, and the text between them, of each pattern in turn."""
    pieces = [text]
    for pattern in patterns:
        found = []
        for piece in pieces:
            at = 0
            for match in regex.finditer(pattern, piece):
                found += [piece[at : match.start()], match[0]]
                at = match.end()
            found.append(piece[at:])
        pieces = [piece for piece in found if piece]
    return pieces


def words(name: str, text: str) -> list[str]:
    backend = tokenizers.Tokenizer(BPE())
    PRE_TOKENIZERS[name].set_up(backend)
    if backend.normalizer is not None:
        text = backend.normalizer.normalize_str(text)
    table = byte_of_character()
    pieces = backend.pre_tokenizer.pre_tokenize_str(text)
    return [bytes(table[each] for each in piece).decode() for piece, _ in pieces]


@pytest.mark.parametrize("name", EXPECTED)
def test_words_equal_another_engines(name: str) -> None:
    is_nfc = PRE_TOKENIZERS[name].is_nfc
    for text in CORPUS:
        normal = tokenizers.normalizers.NFC().normalize_str(text) if is_nfc else text
        assert words(name, text) == cut(normal, EXPECTED[name]), text


@hypothesis.given(text=TEXT, name=st.sampled_from([*EXPECTED]))
@hypothesis.settings(max_examples=300)
def test_words_of_any_text_equal_another_engines(text: str, name: str) -> None:
    hypothesis.assume(tokenizers.normalizers.NFC().normalize_str(text) == text)
    assert words(name, text) == cut(text, EXPECTED[name])


def test_every_name_has_the_words_of_one_that_is_compared() -> None:
    compared = {PRE_TOKENIZERS[name].patterns for name in EXPECTED}
    assert {each.patterns for each in PRE_TOKENIZERS.values()} == compared


@pytest.mark.parametrize("name", ["llama3", "llama-v3", "llama-bpe", "tekken"])
def test_names_of_vocabularies_that_begin_with_a_token_and_ignore_merges(name: str) -> None:
    assert PRE_TOKENIZERS[name].ignores_merges and PRE_TOKENIZERS[name].adds_bos
    assert not PRE_TOKENIZERS["dbrx"].ignores_merges and not PRE_TOKENIZERS["dbrx"].adds_bos
