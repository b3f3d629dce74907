"""Pre-tokenizers for byte-level vocabularies, by the name in a GGUF file.

The patterns are from the models' tokenizer.json files. llama.cpp defines the names.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import tokenizers
from tokenizers import Regex, normalizers, pre_tokenizers

_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_MARKS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s"

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# GPT-4's pattern with up to three digits, and with a single digit.
_LLAMA3 = rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_MARKS}{_SPACES}"
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_QWEN35 = (
    rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*{_SPACES}"
)
_TEKKEN = _CASED % ("", "") + rf"|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*{_SPACES}"
_GPT4O = (
    _CASED % (f"{_ENDINGS}?", f"{_ENDINGS}?")
    + rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*{_SPACES}"
)
_SEED = (
    rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1}}| ?[^\s\p{{L}}\p{{N}}\r\n]+{_SPACES}"
)
_BAILING = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*"
    r"|\s*[\r\n]|\s+(?!\S)|\s+"
)
_DEEPSEEK3 = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*{_SPACES}"
)
_DIGIT = r"\p{N}"
_CJK = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_CJK_KANA = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_NO_PUNCTUATION = " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
_PUNCTUATION = r"[\p{P}$+<=>^~|`]+"


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """The split of a text into words before merges apply.

    Attributes:
        patterns: Regular expressions. An expression splits the previous expression's results.
        splits_words: GPT-2's own pattern is the last to split.
        is_nfc: Normalize the text to NFC first.
        ignores_merges: A word in the vocabulary is a single token, regardless of merges.
        adds_bos: A text begins with the first token, unless the file disables it.
    """

    patterns: tuple[str, ...] = ()
    splits_words: bool = False
    is_nfc: bool = False
    ignores_merges: bool = False
    adds_bos: bool = False

    def set_up(self, backend: tokenizers.Tokenizer) -> None:
        """Set this pre-tokenizer on ``backend``."""
        if self.is_nfc:
            backend.normalizer = normalizers.NFC()
        steps: list[pre_tokenizers.PreTokenizer] = [
            pre_tokenizers.Digits(individual_digits=True)
            if pattern == _DIGIT
            else pre_tokenizers.Split(Regex(pattern), behavior="isolated")
            for pattern in self.patterns
        ]
        last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=self.splits_words)
        backend.pre_tokenizer = pre_tokenizers.Sequence([*steps, last]) if steps else last


def _named(names: str, pre: PreTokenizer) -> Iterable[tuple[str, PreTokenizer]]:
    return [(name, pre) for name in names.split()]


PRE_TOKENIZERS: Mapping[str, PreTokenizer] = dict(
    (
        *_named(
            "default gpt-2 phi-2 mpt olmo jais trillion granite-docling exaone4 gigachat a.x-4.0"
            " mellum",
            PreTokenizer(splits_words=True),
        ),
        *_named(
            "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2",
            PreTokenizer((_DIGIT,), splits_words=True),
        ),
        *_named(
            "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2",
            PreTokenizer((_LLAMA3,), ignores_merges=True, adds_bos=True),
        ),
        *_named("dbrx smaug-bpe glm4 chatglm-bpe", PreTokenizer((_LLAMA3,))),
        *_named("qwen2 deepseek-r1-qwen f2llmv2", PreTokenizer((_QWEN2,), is_nfc=True)),
        *_named("stablelm2 hunyuan solar-open grok-2 megrez kormo", PreTokenizer((_QWEN2,))),
        *_named("qwen35", PreTokenizer((_QWEN35,), is_nfc=True)),
        *_named("tekken", PreTokenizer((_TEKKEN,), ignores_merges=True, adds_bos=True)),
        *_named("gpt-4o llama4 kanana2 minimax-m2", PreTokenizer((_GPT4O,))),
        *_named("seed-coder", PreTokenizer((_SEED,))),
        *_named("bailingmoe bailingmoe2 llada-moe", PreTokenizer((_BAILING,))),
        *_named(
            "deepseek-v3 hunyuan-dense joyai-llm hy_v4",
            PreTokenizer((r"\p{N}{1,3}", _CJK_KANA, _DEEPSEEK3)),
        ),
        *_named(
            "deepseek-coder",
            PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, _DIGIT)),
        ),
        *_named("bloom poro-chat gpt3-finnish", PreTokenizer((_NO_PUNCTUATION,))),
        *_named("viking", PreTokenizer((_NO_PUNCTUATION, _DIGIT))),
        *_named(
            "falcon",
            PreTokenizer((_PUNCTUATION, _GPT2, "[0-9][0-9][0-9]")),
        ),
    )
)
