"""Tokenizers from GGUF metadata: byte-level BPE or SentencePiece BPE.

The pipelines are the same as in the models' own tokenizer.json files. GGUF contains only their
names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import AddedToken, decoders, pre_tokenizers
from tokenizers.models import BPE

from tilewright.errors import CheckpointError, allowed
from tilewright.models.tokenizer.pre_tokenizers import PRE_TOKENIZERS
from tilewright.models.tokenizer.vocabulary import Vocabulary, collect_eos, library_errors

_CONTROL, _USER_DEFINED = 3, 4
_TOKEN_TYPES = range(7)
MAX_PIECE = 128  # characters; recovering merges tries every cut of every piece
_NUMBERED = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}
_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")


def read_metadata(metadata: Mapping[str, object], where: Path) -> Vocabulary:
    """Read the tokenizer in the ``tokenizer.*`` keys of the GGUF file at ``where``.

    Raises:
        CheckpointError: A key is missing or unsupported, or keys are contradictory.
    """
    keys = _Metadata(metadata, where)
    model = metadata.get("tokenizer.ggml.model")
    builders = {"gpt2": _byte_level, "llama": _sentencepiece}
    if not isinstance(model, str) or model not in builders:
        raise keys.error("model", model, allowed(builders))
    with library_errors(CheckpointError, f"{where}: not a tokenizer"):
        backend = builders[model](keys)
        _add_tokens(backend, keys)
    named = {
        name: keys.tokens[index]
        for name, key in _NUMBERED.items()
        if (index := keys.token_id(key)) is not None
    }
    ends = [index for key in _END_KEYS if (index := keys.token_id(key)) is not None]
    template = metadata.get("tokenizer.chat_template")
    template = template if isinstance(template, str) else None
    pre = PRE_TOKENIZERS.get(str(metadata.get("tokenizer.ggml.pre")))
    bos_by_default = model == "llama" or (pre is not None and pre.adds_bos)
    return Vocabulary(
        where=where,
        backend=backend,
        special_tokens=named,
        eos_ids=collect_eos(backend, ends, eos_token=None, template=template),
        chat_template=template,
        add_bos=keys.flag("add_bos_token", default=bos_by_default),
        add_eos=keys.flag("add_eos_token", default=False),
    )


class _Metadata:
    """The checked ``tokenizer.ggml`` keys."""

    def __init__(self, metadata: Mapping[str, object], where: Path) -> None:
        self.metadata = metadata
        self.where = where
        self.tokens: list[str] = self._strings("tokens")
        if not self.tokens:
            raise self.error("tokens", [], "allowed: at least one token")
        self.vocab = {token: index for index, token in enumerate(self.tokens)}
        if len(self.vocab) != len(self.tokens):
            twice = next(t for index, t in enumerate(self.tokens) if self.vocab[t] != index)
            raise self.error("tokens", twice, "allowed: each token once")
        self.types = self._numbers("token_type", default=1)
        if not set(np.unique(self.types).tolist()) <= set(_TOKEN_TYPES):
            raise self.error("token_type", sorted(set(self.types.tolist())), "allowed: 0 to 6")

    def error(self, key: str, value: object, tail: str) -> CheckpointError:
        shown = repr(value)
        shown = shown if len(shown) <= 80 else shown[:77] + "..."
        return CheckpointError(f"{self.where}: tokenizer.ggml.{key} = {shown} is not read; {tail}")

    def get(self, key: str) -> object:
        return self.metadata.get(f"tokenizer.ggml.{key}")

    def _strings(self, key: str) -> list[str]:
        value = self.get(key)
        if not isinstance(value, list):
            raise self.error(key, value, "allowed: an array of strings")
        return value

    def _numbers(self, key: str, default: float | None = None) -> np.ndarray[Any, np.dtype[Any]]:
        """Return a number per token."""
        value = self.get(key)
        if value is None and default is not None:
            return np.full(len(self.tokens), default)
        if not isinstance(value, np.ndarray) or len(value) != len(self.tokens):
            tail = f"allowed: an array of {len(self.tokens)} numbers, one per token"
            raise self.error(key, None if value is None else type(value).__name__, tail)
        return value

    def scores(self) -> list[float]:
        scores: list[float] = self._numbers("scores").tolist()
        return scores

    def merges(self) -> list[tuple[str, str]] | None:
        """Return the merges as pairs, best first, or None if the file has no merges."""
        if self.get("merges") is None:
            return None
        pairs = []
        for merge in self._strings("merges"):
            left, separator, right = merge.partition(" ")
            if not separator or " " in right:
                raise self.error("merges", merge, "allowed: two tokens and one space")
            if left not in self.vocab or right not in self.vocab or left + right not in self.vocab:
                raise self.error("merges", merge, "allowed: tokens of the vocabulary")
            pairs.append((left, right))
        return pairs

    def token_id(self, key: str) -> int | None:
        value = self.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.error(key, value, "allowed: a token id")
        if not 0 <= value < len(self.tokens):
            raise self.error(key, value, f"allowed: 0 to {len(self.tokens) - 1}")
        return value

    def flag(self, key: str, *, default: bool) -> bool:
        value = self.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(key, value, "allowed: true, false")
        return value


def _byte_level(keys: _Metadata) -> tokenizers.Tokenizer:
    pre = keys.get("pre")
    pre = "default" if pre is None else pre
    if not isinstance(pre, str) or pre not in PRE_TOKENIZERS:
        raise keys.error("pre", pre, allowed(PRE_TOKENIZERS, pre))
    merges = keys.merges()
    if merges is None:
        raise keys.error("merges", None, "allowed: an array of strings")
    found = PRE_TOKENIZERS[pre]
    backend = tokenizers.Tokenizer(
        BPE(vocab=keys.vocab, merges=merges, ignore_merges=found.ignores_merges)
    )
    found.set_up(backend)
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(keys: _Metadata) -> tokenizers.Tokenizer:
    """Build transformers' LlamaTokenizer: SentencePiece BPE with byte fallback."""
    add_space = keys.flag("add_space_prefix", default=True)
    merges = keys.merges()
    if merges is None:
        merges = recover_merges(keys)
    backend = tokenizers.Tokenizer(
        BPE(vocab=keys.vocab, merges=merges, fuse_unk=True, byte_fallback=True)
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace(
        replacement="▁", prepend_scheme="first" if add_space else "never", split=False
    )
    steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if add_space:
        steps.append(decoders.Strip(content=" ", left=1))
    backend.decoder = decoders.Sequence(steps)
    return backend


def recover_merges(keys: _Metadata) -> list[tuple[str, str]]:
    """Recover SentencePiece's merges from its scores: all splits of a token into two tokens.

    The order is transformers': best score, then longer parts, then (within a token) ids.
    """
    vocab = keys.vocab
    found: list[tuple[float, int, int, str, str]] = []
    for piece, score in zip(keys.tokens, keys.scores(), strict=True):
        if len(piece) > MAX_PIECE:
            raise keys.error("tokens", piece, f"allowed: at most {MAX_PIECE} characters")
        cuts = ((vocab.get(piece[:at]), vocab.get(piece[at:])) for at in range(1, len(piece)))
        pairs = sorted((a, b) for a, b in cuts if a is not None and b is not None)
        texts = [(keys.tokens[a], keys.tokens[b]) for a, b in pairs]
        found += [(score, len(left), len(right), left, right) for left, right in texts]
    found.sort(key=lambda entry: entry[:3], reverse=True)
    return [(left, right) for *_, left, right in found]


def _add_tokens(backend: tokenizers.Tokenizer, keys: _Metadata) -> None:
    """Add control and user-defined tokens. They are matched before the text is split."""

    def select(kind: int) -> Sequence[AddedToken]:
        return [
            AddedToken(keys.tokens[index], normalized=False, special=kind == _CONTROL)
            for index in np.flatnonzero(keys.types == kind).tolist()
            if keys.tokens[index]
        ]

    backend.add_special_tokens(list(select(_CONTROL)))
    backend.add_tokens(list(select(_USER_DEFINED)))
    if backend.get_vocab_size() != len(keys.tokens):
        raise keys.error("tokens", len(keys.tokens), "allowed: tokens that all have one id")
