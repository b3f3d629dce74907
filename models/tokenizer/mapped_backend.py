"""A tokenizer backend over mapped tables (vocabulary, merges).

A small backend without merges splits a text into characters. This module then applies the merges
from the tables. Long texts build the whole backend from the JSON. Both give equal ids.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from tilewright.errors import CheckpointError
from tilewright.models.tokenizer.vocabulary import library_errors

_MAX_CHARACTERS = 1 << 18
"""Characters encoded with the tables before a process builds the whole backend."""
_MAX_WORDS = 1 << 14


@dataclass(frozen=True, slots=True)
class TokenizerParts:
    """Backend content in a mapped file.

    ``splitter``: JSON of the backend without merges; None if the tables cannot replace the library.
    ``vocab_size``: token count with added tokens. ``sections``: the tables by name.
    """

    splitter: str | None
    ignore_merges: bool
    vocab_size: int
    sections: Mapping[str, np.ndarray]


@dataclass(frozen=True, slots=True)
class Encoded:
    """Token ids, with the field name used by `tokenizers.Encoding`."""

    ids: list[int]


class MappedBackend:
    """A mapped file with the methods of `tokenizers.Tokenizer` called by Tilewright."""

    def __init__(self, parts: TokenizerParts, where: Path) -> None:
        self._where = where
        self.parts = parts
        sections, self._json = parts.sections, parts.sections["json"]
        self._whole: tokenizers.Tokenizer | None = None
        if parts.splitter is None:
            return
        self._offsets, self._order = (sections[name] for name in ("offsets", "order"))
        self._text = sections["text"].data
        # bisect reads plain numbers from a memoryview, which is faster than from an array
        self._pairs = sections["pairs"].data
        self._ranks, self._results = sections["ranks"].data, sections["results"].data
        with library_errors(CheckpointError, f"{where}: not a mapped tokenizer"):
            self._splitter = tokenizers.Tokenizer.from_str(parts.splitter)
        self._added = self._splitter.get_added_tokens_decoder()
        self._added_ids = {token.content: index for index, token in self._added.items()}
        self._special = {token.content for token in self._added.values() if token.special}
        self._known: dict[int, tuple[int, int] | None] = {}
        self._words: dict[tuple[int, ...], list[int]] = {}
        self._characters_left = _MAX_CHARACTERS

    def whole(self) -> tokenizers.Tokenizer:
        """Return the whole backend, built on the first call."""
        if self._whole is None:
            with library_errors(CheckpointError, f"{self._where}: not a tokenizer"):
                self._whole = tokenizers.Tokenizer.from_str(self.to_str())
        return self._whole

    def to_str(self) -> str:
        """Return the `tokenizers` JSON."""
        return self._json.tobytes().decode("utf-8")

    @property
    def decoder(self) -> Any:
        """Decoder from `tokenizers`."""
        return self._splitter.decoder

    @property
    def num_ids(self) -> int:
        """Largest id plus 1."""
        return max(len(self._offsets) - 1, 1 + max(self._added, default=-1))

    def get_vocab_size(self, with_added_tokens: bool = True) -> int:
        """Return the token count, by default with added tokens."""
        return self.parts.vocab_size if with_added_tokens else len(self._order)

    def get_added_tokens_decoder(self) -> dict[int, Any]:
        """Return the added tokens by id."""
        return dict(self._added)

    def token_to_id(self, token: str) -> int | None:
        """Return a token id, or None."""
        found = self._added_ids.get(token)
        return self._find(token.encode("utf-8")) if found is None else found

    def id_to_token(self, index: int) -> str | None:
        """Return a token by its id, or None for an unused id."""
        added = self._added.get(index)
        if added is not None:
            return str(added.content)
        if not 0 <= index < len(self._offsets) - 1:
            return None
        token = self._bytes_of(index)
        return str(token, "utf-8") if token or self._find(b"") == index else None

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text for ``ids``."""
        tokens = [token for token in map(self.id_to_token, ids) if token is not None]
        if skip_special_tokens:
            tokens = [token for token in tokens if token not in self._special]
        text: str = self._splitter.decoder.decode(tokens)
        return text

    def encode(self, text: str, add_special_tokens: bool = True) -> Encoded | tokenizers.Encoding:
        """Return the ids for ``text``."""
        self._characters_left -= len(text)
        if self._characters_left < 0:
            return self.whole().encode(text, add_special_tokens=add_special_tokens)
        split = self._splitter.encode(text, add_special_tokens=add_special_tokens)
        ids: list[int] = []
        word: list[int] = []
        last: int | None = None
        for index, number in zip(split.ids, split.word_ids, strict=True):
            if number is None or number != last:
                ids += self._merged(word)
                word, last = [], number
            word.append(index)
        return Encoded(ids + self._merged(word))

    def _merged(self, word: list[int]) -> list[int]:
        """Return the ids for one word, given by its character ids."""
        if len(word) < 2:
            return word
        key = tuple(word)
        found = self._words.get(key)
        if found is None:
            found = self._whole_word(word) or merge(word, self._rule_of)
            if len(self._words) < _MAX_WORDS:
                self._words[key] = found
        return found

    def _whole_word(self, word: Sequence[int]) -> list[int] | None:
        if not self.parts.ignore_merges:
            return None
        index = self._find(b"".join(map(self._bytes_of, word)))
        return None if index is None else [index]

    def _rule_of(self, pair: int) -> tuple[int, int] | None:
        """Return rank and result of the merge ``left << 32 | right``, or None."""
        try:
            return self._known[pair]
        except KeyError:
            at = bisect.bisect_left(self._pairs, pair)
            is_there = at < len(self._pairs) and self._pairs[at] == pair
            found = (self._ranks[at], self._results[at]) if is_there else None
            self._known[pair] = found
            return found

    def _bytes_of(self, index: int) -> bytes:
        return bytes(self._text[self._offsets[index] : self._offsets[index + 1]])

    def _find(self, token: bytes) -> int | None:
        """Return a vocabulary token's id, or None. Added tokens are not searched."""
        order = self._order
        at = bisect.bisect_left(order, token, key=self._bytes_of)
        is_there = at < len(order) and self._bytes_of(order[at]) == token
        return int(order[at]) if is_there else None


def merge(word: Sequence[int], rule_of: Any) -> list[int]:
    """Apply merges to a word as `tokenizers` does: lowest rank first, then leftmost.

    ``rule_of`` returns rank and result of the pair ``left << 32 | right``, or None.
    """
    symbols, count = list(word), len(word)
    following, before = list(range(1, count + 1)), list(range(-1, count - 1))
    queue = []
    for at in range(count - 1):
        rule = rule_of(symbols[at] << 32 | symbols[at + 1])
        if rule is not None:
            queue.append((rule[0], at, rule[1]))
    heapq.heapify(queue)
    while queue:
        _, at, result = heapq.heappop(queue)
        right = following[at]
        if symbols[at] < 0 or right == count:
            continue
        rule = rule_of(symbols[at] << 32 | symbols[right])
        if rule is None or rule[1] != result:
            continue  # a neighbor has changed since
        symbols[at], symbols[right] = result, -1
        following[at] = behind = following[right]
        if behind < count:
            before[behind] = at
            rule = rule_of(result << 32 | symbols[behind])
            if rule is not None:
                heapq.heappush(queue, (rule[0], at, rule[1]))
        left = before[at]
        if left >= 0:
            rule = rule_of(symbols[left] << 32 | result)
            if rule is not None:
                heapq.heappush(queue, (rule[0], left, rule[1]))
    return [symbol for symbol in symbols if symbol >= 0]
