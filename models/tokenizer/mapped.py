"""A tokenizer in one mapped file, opened in milliseconds for any vocabulary size.

The file holds the `tokenizers` JSON and sorted tables (vocabulary, merges); see `mapped_backend`
for their use. No containers here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from tokenizers.pre_tokenizers import ByteLevel

from tilewright.errors import CheckpointError, one_line
from tilewright.models.checkpoints.mapped_file import map_file
from tilewright.models.tokenizer.mapped_backend import MappedBackend, TokenizerParts
from tilewright.models.tokenizer.vocabulary import Vocabulary, library_errors

_MAGIC = b"TWTOKENS"
_VERSION = 1
_ALIGNMENT = 8
_SECTIONS = {
    "json": np.uint8,
    "offsets": np.uint32,
    "text": np.uint8,
    "order": np.uint32,
    "pairs": np.uint64,
    "ranks": np.uint32,
    "results": np.uint32,
}
_MAX_HEADER = 1 << 26
_NUM_BYTES = 256


class _MappedHeader(msgspec.Struct, frozen=True, kw_only=True):
    version: int
    splitter: str | None
    ignore_merges: bool
    vocab_size: int
    special_tokens: dict[str, str]
    eos_ids: tuple[int, ...]
    chat_template: str | None
    add_bos: bool | None
    add_eos: bool | None
    sizes: dict[str, int]


def mapped_bytes(vocabulary: Vocabulary) -> bytes:
    """Return a tokenizer as file content.

    Raises:
        CheckpointError: the library cannot write the tokenizer.
    """
    parts = _parts_of(vocabulary)
    header = _MappedHeader(
        version=_VERSION,
        splitter=parts.splitter,
        ignore_merges=parts.ignore_merges,
        vocab_size=parts.vocab_size,
        special_tokens=dict(vocabulary.special_tokens),
        eos_ids=vocabulary.eos_ids,
        chat_template=vocabulary.chat_template,
        add_bos=vocabulary.add_bos,
        add_eos=vocabulary.add_eos,
        sizes={name: each.nbytes for name, each in parts.sections.items()},
    )
    head = msgspec.json.encode(header)
    data = [_MAGIC + len(head).to_bytes(8, "little"), head]
    at = sum(map(len, data))
    for each in parts.sections.values():
        data += [bytes(-at % _ALIGNMENT), each.tobytes()]
        at += -at % _ALIGNMENT + each.nbytes
    return b"".join(data)


def _parts_of(vocabulary: Vocabulary) -> TokenizerParts:
    """Return the backend content. A mapped backend already has it."""
    backend: Any = vocabulary.backend
    if isinstance(backend, MappedBackend):
        return backend.parts
    with library_errors(CheckpointError, f"{vocabulary.where}: the tokenizer cannot be written"):
        text: str = backend.to_str()
        size = backend.get_vocab_size(with_added_tokens=True)
    values = json.loads(text)
    tables = _tables(values) if _has_tables(values) else {}
    return TokenizerParts(
        splitter=json.dumps(_splitter(values)) if tables else None,
        ignore_merges=bool(values["model"].get("ignore_merges")),
        vocab_size=size,
        sections={"json": np.frombuffer(text.encode(), np.uint8), **tables},
    )


def read_mapped(path: Path, where: Path) -> Vocabulary:
    """Return the tokenizer in the file at ``path``. Messages name ``where``.

    Raises:
        CheckpointError: the file is damaged, or `mapped_bytes` did not make it.
    """
    try:
        header, sections = _read(path)
        if header.splitter is not None:
            _check_tables(sections)
        parts = TokenizerParts(header.splitter, header.ignore_merges, header.vocab_size, sections)
        backend: Any = MappedBackend(parts, where)
    except (msgspec.MsgspecError, ValueError, KeyError, IndexError) as error:
        raise CheckpointError(
            f"{path}: not a mapped tokenizer: {one_line(error)}; allowed: the file of this version"
        ) from None
    return Vocabulary(
        where=where,
        backend=backend if header.splitter is not None else backend.whole(),
        special_tokens=header.special_tokens,
        eos_ids=header.eos_ids,
        chat_template=header.chat_template,
        add_bos=header.add_bos,
        add_eos=header.add_eos,
    )


def _has_tables(values: Mapping[str, Any]) -> bool:
    """Return whether the tables can replace the library: plain byte pair encoding."""
    model = values["model"]
    if model.get("type") != "BPE" or model.get("dropout") or not values.get("decoder"):
        return False
    if model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
        return False
    vocab = model["vocab"]
    if not vocab or len(set(vocab.values())) != len(vocab):
        return False
    if any(len(each["content"]) == 1 and each["content"] not in vocab for each in _added(values)):
        return False  # the splitter would find it inside words
    if model.get("ignore_merges"):  # a whole word must be known from its characters
        return _ends_in_bytes(values["pre_tokenizer"]) and {*ByteLevel.alphabet()} <= vocab.keys()
    return True


def _ends_in_bytes(pre_tokenizer: Mapping[str, Any] | None) -> bool:
    """Return whether the last pre-tokenizer step maps a byte to a character."""
    step: Mapping[str, Any] = pre_tokenizer or {}
    while step.get("type") == "Sequence":
        step = (step["pretokenizers"] or [{}])[-1]
    return step.get("type") == "ByteLevel"


def _added(values: Mapping[str, Any]) -> list[dict[str, Any]]:
    return values.get("added_tokens") or []


def _splitter(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the JSON of a tokenizer with the same ids and no merges."""
    model = values["model"]
    bytes_of = {f"<0x{byte:02X}>" for byte in range(_NUM_BYTES)}
    kept = {
        token: index
        for token, index in model["vocab"].items()
        if len(token) == 1 or token in bytes_of or token == model.get("unk_token")
    }
    kept.update({each["content"]: each["id"] for each in _added(values)})
    model = {**model, "vocab": kept, "merges": [], "ignore_merges": False}
    return {**values, "model": model}


def _tables(values: Mapping[str, Any]) -> dict[str, np.ndarray]:
    vocab: dict[str, int] = values["model"]["vocab"]
    tokens = [b""] * (1 + max(vocab.values()))
    for token, index in vocab.items():
        tokens[index] = token.encode("utf-8")
    ends = np.cumsum([0, *map(len, tokens)], dtype=np.uint64)
    pairs, results = [], []
    for left, right in values["model"]["merges"]:
        pairs.append(vocab[left] << 32 | vocab[right])
        results.append(vocab[left + right])
    keys = np.array(pairs, dtype=np.uint64)
    order = np.argsort(keys)
    return {
        "offsets": ends.astype(np.uint32),
        "text": np.frombuffer(b"".join(tokens), np.uint8),
        "order": np.array(sorted(vocab.values(), key=tokens.__getitem__), dtype=np.uint32),
        "pairs": keys[order],
        "ranks": order.astype(np.uint32),
        "results": np.array(results, dtype=np.uint32)[order],
    }


def _read(path: Path) -> tuple[_MappedHeader, dict[str, np.ndarray]]:
    data = map_file(path)
    head = len(_MAGIC) + 8
    if bytes(data[: len(_MAGIC)]) != _MAGIC or len(data) < head:
        raise ValueError("wrong magic")
    size = int.from_bytes(data[len(_MAGIC) : head], "little")
    if size > min(_MAX_HEADER, len(data) - head):
        raise ValueError("cut short")
    header = msgspec.json.decode(bytes(data[head : head + size]), type=_MappedHeader)
    if header.version != _VERSION:
        raise ValueError(f"version {header.version}")
    at, sections = head + size, {}
    for name, kind in _SECTIONS.items():
        if name not in header.sizes:
            continue
        at += -at % _ALIGNMENT
        num_bytes = header.sizes[name]
        if not 0 <= num_bytes <= len(data) - at:
            raise ValueError("cut short")
        count, rest = divmod(num_bytes, np.dtype(kind).itemsize)
        if rest:
            raise ValueError("a table ends inside a number")
        sections[name] = np.frombuffer(data, kind, count, at)
        at += num_bytes
    if at != len(data) or (header.splitter is not None and len(sections) != len(_SECTIONS)):
        raise ValueError("unexpected sections")
    return header, sections


def _check_tables(sections: Mapping[str, np.ndarray]) -> None:
    offsets, order, pairs = (sections[name] for name in ("offsets", "order", "pairs"))
    num_ids = len(offsets) - 1
    fits = num_ids >= 0 and int(offsets[-1]) <= len(sections["text"]) and not offsets[0]
    fits = fits and bool(np.all(offsets[1:] >= offsets[:-1]))
    fits = fits and int(order.max(initial=0)) < max(num_ids, 1)
    fits = fits and int(sections["results"].max(initial=0)) < max(num_ids, 1)
    fits = fits and bool(np.all(pairs[1:] > pairs[:-1]))
    if not fits or not len(pairs) == len(sections["ranks"]) == len(sections["results"]):
        raise ValueError("the tables do not fit together")
