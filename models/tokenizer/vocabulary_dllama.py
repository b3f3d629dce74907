"""Reading and writing of dllama ``.t`` tokenizers: byte-level BPE by scores, without a
pre-tokenizer.

Texts are split as in dllama. This differs slightly from the model's own tokenizer.
"""

from __future__ import annotations

import itertools
import math
import operator
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, decoders, pre_tokenizers
from tokenizers.models import BPE

from tilewright.errors import CheckpointError, allowed
from tilewright.models.tokenizer.tokenizer import Tokenizer, byte_of_character
from tilewright.models.tokenizer.vocabulary import Vocabulary, collect_eos, library_errors
from tilewright.utils.files import read_regular

MAGIC = 0x567124
MAX_PIECE = 256  # bytes; finding merges tries every cut of every token
_VERSION = 1
_KEYS: Mapping[int, str] = {
    0: "version",
    1: "vocab_size",
    2: "max_token_length",
    3: "bos_id",
    4: "eos_id",
    5: "pad_id",
    6: "chat_eos_id",
    7: "chat_template_length",
    9: "num_eos_ids",
    10: "add_bos",
}
_WRITTEN = (3, 0, 1, 2, 7, 9, 10)  # order in dllama's converter
_PREFIX = struct.Struct("<iI")
_PAIR = struct.Struct("<ii")
_ID = struct.Struct("<i")
_TOKEN = struct.Struct("<fI")


@dataclass(frozen=True, slots=True)
class _DllamaVocabulary:
    """Contents of a ``.t`` file."""

    tokens: list[bytes]
    scores: list[float]
    bos_id: int | None
    eos_ids: list[int]
    chat_template: str | None
    add_bos: bool


class _VocabularyCursor:
    """A position in the file with bounds checks."""

    def __init__(self, data: bytes, path: Path) -> None:
        self.data = data
        self.path = path
        self.at = 0

    def error(self, what: str) -> CheckpointError:
        return CheckpointError(
            f"{self.path}: {what}; the tokenizer is cut short or corrupt; allowed: a complete file"
        )

    def take(self, num_bytes: int, what: str) -> bytes:
        left = len(self.data) - self.at
        if not 0 <= num_bytes <= left:
            raise self.error(f"{what} at byte {self.at} needs {num_bytes} bytes, {left} are left")
        self.at += num_bytes
        return self.data[self.at - num_bytes : self.at]


def read_tokenizer(path: Path) -> Vocabulary:
    """Read the ``.t`` file at ``path``.

    Special tokens are matched first. As in dllama, they are the tokens after the beginning token.
    If single bytes are also in this range, dllama would match only special tokens. In this case the
    special tokens are the tokens that are not a pair of two tokens.

    Raises:
        CheckpointError: The file is missing, truncated, corrupt or unsupported.
    """
    try:
        found = _parse(_VocabularyCursor(read_regular(path), path))
    except OSError as error:
        raise CheckpointError(
            f"{path}: cannot be read: {error.strerror}; allowed: a readable file"
        ) from None
    ids = _ids(found, path)
    special = _special_ids(found, ids)
    names = _token_names(found, special, path)
    with library_errors(CheckpointError, f"{path}: not a tokenizer"):
        backend = _backend(found, ids, special, names)
    named = {"bos_token": found.bos_id, "eos_token": next(iter(found.eos_ids), None)}
    return Vocabulary(
        where=path,
        backend=backend,
        special_tokens={key: names[at] for key, at in named.items() if at is not None},
        eos_ids=collect_eos(backend, found.eos_ids, eos_token=None, template=found.chat_template),
        chat_template=found.chat_template,
        add_bos=found.add_bos and found.bos_id is not None,
        add_eos=False,
    )


def token_order(vocabulary: Vocabulary) -> tuple[range, ...]:
    """Return the ids of ``vocabulary`` in ``.t`` file order, as ranges.

    Rows of the model's embedding and head use the same order.

    Raises:
        CheckpointError: The tokenizer has no special token, or its beginning token is a prefix of
            another special token.
    """
    ids, _ = _arrange(vocabulary)
    runs = []
    for _, run in itertools.groupby(enumerate(ids), key=lambda pair: pair[1] - pair[0]):
        found = [index for _, index in run]
        runs.append(range(found[0], found[-1] + 1))
    return tuple(runs)


def _arrange(vocabulary: Vocabulary) -> tuple[list[int], int]:
    """Return the ids in file order, and the ordinary token count at the start.

    In dllama, all tokens after the beginning token are special, and the first match wins. Therefore
    the beginning token is the first special token, and longer tokens precede their prefixes.
    """
    tokenizer = Tokenizer(vocabulary)
    added = _added(vocabulary)
    bos = min(added, default=None) if tokenizer.bos_id is None else tokenizer.bos_id
    if bos is None:
        raise CheckpointError(
            f"{vocabulary.where}: no beginning token, nor any special one; "
            "allowed: a tokenizer with one"
        )
    first = added.pop(bos, None) or tokenizer.token_bytes(bos).decode(errors="replace")
    hidden = next((text for text in added.values() if text.startswith(first)), None)
    if hidden is not None:
        raise CheckpointError(
            f"{vocabulary.where}: the beginning token {first!r} begins the special token "
            f"{hidden!r}, which dllama would never find; allowed: one that begins no other"
        )
    longer = {
        at: sum(other.startswith(text) for other in added.values()) for at, text in added.items()
    }
    special = sorted(sorted(added), key=longer.__getitem__)
    ordinary = [at for at in range(tokenizer.vocab_size) if at not in added and at != bos]
    return [*ordinary, bos, *special], len(ordinary)


def _added(vocabulary: Vocabulary) -> dict[int, str]:
    """Return each whole-matched token's text by id."""
    added = vocabulary.backend.get_added_tokens_decoder()
    return {index: token.content for index, token in added.items()}


def pack_tokenizer(vocabulary: Vocabulary) -> bytes:
    """Return ``vocabulary`` as a ``.t`` file in `token_order`. Scores are negative positions.

    Raises:
        CheckpointError: The tokens are not byte-level, or required tokens are missing.
    """
    tokenizer = Tokenizer(vocabulary)
    where = vocabulary.where
    if not isinstance(vocabulary.backend.decoder, decoders.ByteLevel):
        raise CheckpointError(
            f"{where}: tokens that are pieces of text have no place in a dllama tokenizer; "
            "allowed: byte-level BPE"
        )
    ids, num_ordinary = _arrange(vocabulary)
    if not tokenizer.eos_ids:
        raise CheckpointError(f"{where}: no end token; allowed: a tokenizer with one")
    added = _added(vocabulary)
    tokens = [
        added[index].encode() if index in added else tokenizer.token_bytes(index) for index in ids
    ]
    if b"" in tokens:
        raise CheckpointError(
            f"{where}: id {ids[tokens.index(b'')]} has no token; allowed: one for every id up to "
            f"{len(tokens) - 1}"
        )
    place = {index: at for at, index in enumerate(ids)}
    template = (vocabulary.chat_template or "").encode()
    values = {
        0: _VERSION,
        1: len(tokens),
        2: max(map(len, tokens)),
        3: num_ordinary,
        7: len(template),
        9: len(tokenizer.eos_ids),
        10: int(tokenizer.encode("", add_special=True)[:1] == [tokenizer.bos_id]),
    }
    pairs = b"".join(_PAIR.pack(key, values[key]) for key in _WRITTEN if key != 7 or template)
    parts = [_PREFIX.pack(MAGIC, _PREFIX.size + len(pairs)), pairs, template]
    parts += [_ID.pack(place[index]) for index in tokenizer.eos_ids]
    for at, token in enumerate(tokens):
        parts += [_TOKEN.pack(-float(at), len(token)), token]
    return b"".join(parts)


def _parse(cursor: _VocabularyCursor) -> _DllamaVocabulary:
    values = _header(cursor)
    eos_ids = [values[key] for key in (4, 6) if key in values]
    raw = cursor.take(values.get(7, 0), "chat template")
    try:
        template = raw.decode() or None
    except UnicodeDecodeError:
        raise cursor.error("the chat template is not UTF-8") from None
    count = values.get(9, 0)
    eos_ids += [found for (found,) in _ID.iter_unpack(cursor.take(4 * count, "end ids"))]
    tokens, scores = _tokens(cursor, values.get(1, 0), values.get(2, 0))
    bos = values.get(3)
    for index in [*eos_ids, *([] if bos is None else [bos])]:
        if not 0 <= index < len(tokens):
            raise CheckpointError(
                f"{cursor.path}: beginning or end id {index}; allowed: 0 to {len(tokens) - 1}"
            )
    return _DllamaVocabulary(
        tokens, scores, bos, eos_ids, template, add_bos=bool(values.get(10, 1))
    )


def _header(cursor: _VocabularyCursor) -> dict[int, int]:
    magic, nbytes = _PREFIX.unpack(cursor.take(_PREFIX.size, "magic"))
    if magic != MAGIC:
        raise CheckpointError(
            f"{cursor.path}: not a dllama tokenizer (it does not begin with {MAGIC:#x}); allowed: "
            "a .t file of dllama"
        )
    if nbytes % _PAIR.size or not _PREFIX.size <= nbytes <= 1 << 10:
        raise cursor.error(f"the header says it has {nbytes} bytes")
    values: dict[int, int] = {}
    for key, value in _PAIR.iter_unpack(cursor.take(nbytes - _PREFIX.size, "header")):
        if key not in _KEYS:
            raise CheckpointError(
                f"{cursor.path}: header key {key} = {value} is not read; {allowed(_KEYS)}"
            )
        if key in values:
            raise cursor.error(f"{_KEYS[key]} (key {key}) stands twice")
        values[key] = value
    if values.get(0) != _VERSION:
        raise CheckpointError(
            f"{cursor.path}: version (key 0) = {values.get(0)} is not read; allowed: {_VERSION}"
        )
    return values


def _tokens(cursor: _VocabularyCursor, count: int, longest: int) -> tuple[list[bytes], list[float]]:
    left = len(cursor.data) - cursor.at
    if not 1 <= count <= left // (_TOKEN.size + 1):
        raise cursor.error(f"vocab_size (key 1) is {count}, and {left} bytes are left")
    tokens, scores = [], []
    for index in range(count):
        score, length = _TOKEN.unpack(cursor.take(_TOKEN.size, f"token {index}"))
        token = cursor.take(length, f"token {index}")
        if not 1 <= length <= longest:
            raise cursor.error(f"token {index} has {length} bytes, allowed: 1 to {longest}")
        if not math.isfinite(score):
            raise cursor.error(f"the score of token {index} is {score}")
        tokens.append(token)
        scores.append(score)
    if cursor.at != len(cursor.data):
        raise cursor.error(f"{len(cursor.data) - cursor.at} bytes follow the last token")
    return tokens, scores


def _ids(found: _DllamaVocabulary, path: Path) -> dict[bytes, int]:
    ids = {token: index for index, token in enumerate(found.tokens)}
    if len(ids) != len(found.tokens):
        index = next(at for at, token in enumerate(found.tokens) if ids[token] != at)
        raise CheckpointError(
            f"{path}: token {index} is the same as token {ids[found.tokens[index]]}; "
            "allowed: each token once"
        )
    longest = max(found.tokens, key=len)
    if len(longest) > MAX_PIECE:
        raise CheckpointError(
            f"{path}: token {ids[longest]} has {len(longest)} bytes; allowed: at most {MAX_PIECE}"
        )
    return ids


def _special_ids(found: _DllamaVocabulary, ids: Mapping[bytes, int]) -> frozenset[int]:
    last_byte = max((at for token, at in ids.items() if len(token) == 1), default=-1)
    if found.bos_id is not None and found.bos_id > last_byte:
        return frozenset(range(found.bos_id, len(found.tokens)))
    made = {
        at for token, at in ids.items() if len(token) == 1 or any(True for _ in _cuts(token, ids))
    }
    return frozenset(range(len(found.tokens))) - made


def _token_names(found: _DllamaVocabulary, special: frozenset[int], path: Path) -> list[str]:
    """Return library names: special tokens as text, all other tokens in GPT-2's alphabet."""
    alphabet = {byte: character for character, byte in byte_of_character().items()}
    names = []
    for index, token in enumerate(found.tokens):
        try:
            text = token.decode() if index in special else None
        except UnicodeDecodeError:
            raise CheckpointError(
                f"{path}: special token {index} is not UTF-8; allowed: UTF-8 text"
            ) from None
        names.append("".join(alphabet[byte] for byte in token) if text is None else text)
    if len(set(names)) != len(names):
        raise CheckpointError(
            f"{path}: a special token is spelt as another token is in the library; "
            "allowed: special tokens unlike all others"
        )
    return names


def _backend(
    found: _DllamaVocabulary, ids: Mapping[bytes, int], special: frozenset[int], names: list[str]
) -> tokenizers.Tokenizer:
    """Build the backend. A pair with a token as result is a merge, best score first."""
    merges: list[tuple[float, str, str]] = []
    for index, token in enumerate(found.tokens):
        if index not in special:
            pairs = [pair for pair in _cuts(token, ids) if special.isdisjoint(pair)]
            merges += [(-found.scores[index], names[a], names[b]) for a, b in pairs]
    merges.sort(key=operator.itemgetter(0))
    vocab = {name: index for index, name in enumerate(names)}
    backend = tokenizers.Tokenizer(BPE(vocab=vocab, merges=[merge[1:] for merge in merges]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(names[at], normalized=False) for at in sorted(special)])
    return backend


def _cuts(token: bytes, ids: Mapping[bytes, int]) -> Iterator[tuple[int, int]]:
    """Yield every pair of tokens with ``token`` as result."""
    for at in range(1, len(token)):
        left, right = ids.get(token[:at]), ids.get(token[at:])
        if left is not None and right is not None:
            yield left, right
